"""Sizes of a model that a user names, from its config.json alone: a directory, or a name in the hub's local cache."""

from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PretrainedConfig

from engines.loading import read_config
from engines.weights.empty_model import meta_model
from runplan.model.model_shape import ModelShape, count_parameters, shape_of

TOLERANCE = 0.01
"""Relative difference of counted parameters from the module's own that a plan of memory stands."""


def own_model(model: Path, sees: bool = False) -> ModelShape:
    """Return the sizes of a model; no weight is read, and nothing is downloaded.

    `sees`: its vision tower is run too.

    Raises:
        ValueError: there is no config.json, or its model is none whose memory can be counted; the text says what to do.
    """
    directory = known_directory(model)
    config = read_config(directory)
    shape = replace(_shape(config, model.name), source=f"{directory / 'config.json'}")
    if sees and shape.vision is None:
        raise ValueError(f"the vision tower of {config.model_type!r} has no plan of its memory, but Qwen3.5's has")
    module, counted = _parameters(config), count_parameters(shape).total
    if abs(counted - module) > TOLERANCE * module:
        raise ValueError(
            f"memory of {shape.model_type!r} is not planned: its layers would count as {counted:,} parameters, the "
            f"module has {module:,}"
        )
    return shape


def known_directory(model: Path) -> Path:
    """Return the directory of a model here, or in the hub's cache; ValueError where it is in neither."""
    if model.exists():
        return model
    repository, _, revision = str(model).partition("@")
    try:
        cached = try_to_load_from_cache(repository, "config.json", revision=revision or None)
    except HFValidationError:
        cached = None
    if isinstance(cached, str):
        return Path(cached).parent
    raise ValueError(
        f"{model} is no directory here, nor in the hub's cache, so that its sizes are not known: give its directory, "
        f"or fetch its config first (hf download {repository} config.json)"
    )


def _shape(config: PretrainedConfig, name: str) -> ModelShape:
    try:
        return shape_of(config, name)
    except (AttributeError, ValueError) as error:
        raise ValueError(f"memory of {config.model_type!r} is not planned: {error}") from error


def _parameters(config: PretrainedConfig) -> int:
    """Count the parameters of the text model, made without memory."""
    return sum(parameter.numel() for parameter in meta_model(config.get_text_config(), torch.float32).parameters())
