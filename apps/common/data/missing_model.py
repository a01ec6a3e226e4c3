"""A model's directory that is named and not there."""

from pathlib import Path


def no_directory(model: Path) -> str:
    """Return the text for a model that is no directory."""
    return f"no model directory {model}; --model takes a local Hugging Face directory"


def is_missing(model: Path | None) -> bool:
    """Return whether a model's directory is named and not there; OWNER/NAME of the hub is for others to say."""
    return model is not None and not model.exists() and (model.is_absolute() or len(model.parts) != 2)
