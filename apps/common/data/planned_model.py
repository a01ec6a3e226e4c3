"""Facts of the named model that a plan reads, from its config.json; without a name nothing slow is imported."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from engines import EngineConfig

if TYPE_CHECKING:  # slow to load, and a command line needs none of it
    from runplan.model.model_shape import ModelShape


def sizes_of(model: Path | None, engine: EngineConfig) -> tuple[ModelShape | None, str | None]:
    """Return the sizes of a model for a plan, or why they are not known; neither where none is named."""
    if model is None:
        return None, None
    from runplan.model.own_model import own_model  # imports torch

    try:
        return own_model(model, engine.vision != "off"), None
    except ValueError as error:
        return None, str(error)


def fields_of(model: Path | None) -> frozenset[str] | None:
    """Return the fields of a model's config for a plan; None where none is named, or it can't be read."""
    if model is None:
        return None
    from apps.common.data.model_files import config_fields  # imports torch
    from engines.loading import read_config  # the same
    from runplan.model.own_model import known_directory  # the same

    with suppress(ValueError):
        return config_fields(read_config(known_directory(model)))
    return None


def balances(model: Path | None) -> bool:
    """Return whether a model's config asks for its router's balancing loss; False where it can't be read."""
    if model is not None:
        from engines.loading import read_config  # imports torch
        from runplan.model.own_model import known_directory  # the same

        with suppress(ValueError):
            text = read_config(known_directory(model)).get_text_config()
            return bool(getattr(text, "output_router_logits", False) and getattr(text, "router_aux_loss_coef", 0))
    return False
