"""Where a recipe comes from: the script that it restates, its model and data, and each deviation in a line."""

import json
from dataclasses import dataclass
from pathlib import Path

from runplan.model.model_shape import ModelShape


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


def model_type(directory: Path | None) -> str | None:
    """Return what the config.json of a model's directory says it is; None where there is none to read."""
    path = None if directory is None else directory / "config.json"
    if path is None or not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None  # a run says what is wrong with it
    kind = config.get("model_type") if isinstance(config, dict) else None
    return kind if isinstance(kind, str) else None
