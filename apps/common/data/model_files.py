"""Check of a model directory before anything is built; errors name the file that is missing, cut short or broken."""

import json
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig

from engines.families.registry import family_of
from engines.loading import read_config
from engines.weights.empty_model import empty_model
from engines.weights.model_directory import ModelDirectory
from engines.weights.model_weights import ModelWeights


def check_model_directory(directory: Path) -> PretrainedConfig:
    """Return the configuration of a local Hugging Face directory after a check that an engine can load it.

    Its JSON files are read, the headers of its weights held against the model of its configuration; no tensor is read.

    Raises:
        ValueError: no such directory, a family that is not supported, a file or tensor that is missing, cut short or
            not known; the text names the directory.
    """
    if not directory.is_dir():
        raise ValueError(f"no model directory {directory}; --model takes a local Hugging Face directory")
    for path in sorted(directory.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if path.name == "config.json" and not isinstance(content, dict):
            raise ValueError(f"{path}: expected an object, got {type(content).__name__}")
    try:
        config = read_config(directory)
        family = family_of(config)
        weights = ModelDirectory.read(directory)
        ModelWeights.of(family, empty_model(config, torch.float32), weights)
    except (ValueError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"{directory} can't be used: {error}") from error
    return config


def longest_sequence(config: PretrainedConfig) -> int | None:
    """Return the most tokens that a model's positions allow; None where its configuration does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)
