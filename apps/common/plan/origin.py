"""Where a recipe comes from: the script that it restates, its model and data, and each deviation in a line."""

from dataclasses import dataclass

from apps.common.plan.model_shape import ModelShape


@dataclass(frozen=True)
class Origin:
    """Facts that the settings alone do not hold."""

    script: str
    """The launch script, and the change that brought it."""
    shape: ModelShape
    dataset: str
    """What the script trains on."""
    dataset_rows: int | None = None
    """Rows of its training split; None where the data is the user's."""
    deviations: tuple[str, ...] = ()
    """What is not as in the script, and why."""
    remarks: tuple[str, ...] = ()
    """What else to know about the data."""
