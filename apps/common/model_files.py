"""A model directory looked at before anything is built: what is missing, cut short or broken is said by its file."""

import json
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, PretrainedConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def check_model_directory(directory: Path) -> PretrainedConfig:
    """The configuration of a local Hugging Face directory whose files are there and whole.

    Weights are opened, which checks each file's header against its length; no tensor is read. Whether the tensors fit
    the model is for the engine to say.

    Raises:
        ValueError: no such directory, a file is missing, cut short, or not what its name says.
    """
    if not directory.is_dir():
        raise ValueError(f"no model directory {directory}; --model takes a local Hugging Face directory")
    if not (directory / "config.json").is_file():
        raise ValueError(f"{directory} has no config.json: it is not a Hugging Face model directory")
    for path in sorted(directory.glob("*.json")):
        content = _read_json(path)
        if path.name in ("config.json", INDEX) and not isinstance(content, dict):
            raise ValueError(f"{path}: expected an object, got {type(content).__name__}")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"{directory / 'config.json'} describes no model that transformers knows: {error}") from error
    for path in weight_files(directory):
        _check_weights(path)
    return config


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model directory, those of its index where it has one.

    Raises:
        ValueError: there are none, or one that the index names is missing.
    """
    if not (directory / INDEX).is_file():
        if not (directory / SINGLE).is_file():
            raise ValueError(f"{directory} has no weights: neither {SINGLE} nor {INDEX}")
        return [directory / SINGLE]
    names = _read_json(directory / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{directory / INDEX} has no weight_map of tensor names to file names")
    files = [directory / name for name in sorted(set(names.values()))]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ValueError(f"{directory} lacks {', '.join(missing)}, which {INDEX} names")
    return files


def longest_sequence(config: PretrainedConfig) -> int | None:
    """The most tokens that a model's positions are made for; None where its configuration does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def _check_weights(path: Path) -> None:
    try:
        with safe_open(path, framework="pt") as file:
            empty = not list(file.keys())
    except SafetensorError as error:
        raise ValueError(f"{path} is not whole: {error}") from error
    if empty:
        raise ValueError(f"{path} holds no tensor")
