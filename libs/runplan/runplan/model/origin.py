"""Origin of a recipe: the script that it follows, its model and data, and each deviation in a line."""

import json
from dataclasses import dataclass
from pathlib import Path

from runplan.model.model_shape import ModelShape


@dataclass(frozen=True)
class Origin:
    """Facts that the settings alone do not hold."""

    script: str
    """The launch script, and the change that added it."""
    shape: ModelShape
    dataset: str
    """Dataset of the script."""
    dataset_rows: int | None = None
    """Rows of its training split; None where the data is the user's."""
    deviations: tuple[str, ...] = ()
    """Differences from the script, and why."""
    remarks: tuple[str, ...] = ()
    """Further remarks on the data."""


def model_type(directory: Path | None) -> str | None:
    """Return the model type in a directory's config.json; None where there is none to read."""
    path = None if directory is None else directory / "config.json"
    if path is None or not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None  # a run reports what is wrong with it
    kind = config.get("model_type") if isinstance(config, dict) else None
    return kind if isinstance(kind, str) else None
