"""Opening of a model directory before anything is built; errors name the file that is missing, cut short or broken."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import PretrainedConfig

from apps.common.data.missing_model import no_directory
from engines import EngineConfig
from engines.loading import LoadedModel, open_model, read_config
from engines.weights.hub import description_directory
from engines.weights.model_directory import has_weights


def open_model_directory(directory: Path, config: EngineConfig) -> LoadedModel:
    """Open a local Hugging Face directory for an engine of this configuration, which `build_engine` takes as its model.

    Its JSON files are read, the headers of its weights held against the model of its configuration; no tensor is read.

    Raises:
        ValueError: no such directory, a family that is not supported, a file or tensor that is missing, cut short or
            not known; the text names the directory.
    """
    _check_json(directory)
    with _named(directory):
        return open_model(replace(config, model=str(directory)))


def open_description(directory: Path, config: EngineConfig) -> LoadedModel:
    """Open a directory without weights: a model of its config, on the meta device. ValueError as for one with them."""
    _check_json(directory)
    with _named(directory), torch.device("meta"):
        return open_model(replace(config, model=None), read_config(directory))


def _check_json(directory: Path) -> None:
    if not directory.is_dir():
        raise ValueError(no_directory(directory))
    for path in sorted(directory.glob("*.json")):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not JSON: {error}") from error
        if path.name == "config.json" and not isinstance(content, dict):
            raise ValueError(f"{path}: expected an object, got {type(content).__name__}")


@contextmanager
def _named(directory: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, AttributeError, StrictDataclassError) as error:
        raise ValueError(f"{directory} can't be used: {error}") from error


def config_of_model(directory: Path, opened: LoadedModel | None) -> PretrainedConfig | None:
    """Return the configuration of a model that was opened, or that could not be; None where it can't be read."""
    if opened is not None:
        return opened.config
    with suppress(ValueError):
        return read_config(directory)
    return None


def available_files(model: Path | None) -> tuple[Path | None, bool]:
    """Return the directory of a model, and whether its weights are there; None for a model that is to be made.

    Of a model of the hub config and tokenizer are fetched, so that what they refuse is told before its weights are.

    Raises:
        ValueError: there is neither a directory nor a snapshot; the text says why.
    """
    if model is None or model.is_dir():
        return model, True
    directory = description_directory(model)
    return directory, has_weights(directory)


@contextmanager
def made_for_checks(make: Callable[[Path], object], lines: list[str]) -> Iterator[Path]:
    """Make a recipe's model for a moment: what refuses the run for it is told with the rest, in `lines`."""
    with tempfile.TemporaryDirectory(prefix="model_") as folder:
        directory = Path(folder) / "model"
        make(directory)
        yield directory
    lines[:] = [line.replace(str(directory), "the recipe's model") for line in lines]


def config_fields(model: PretrainedConfig) -> frozenset[str]:
    """Return the fields of a model's config and of its text part, nested ones behind dots."""
    return frozenset((*_dotted(model.to_dict()), *_dotted(model.get_text_config().to_dict())))


def _dotted(values: Mapping[Any, Any]) -> Iterator[str]:
    for name, value in values.items():
        yield str(name)
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in _dotted(value))


def longest_sequence(config: PretrainedConfig) -> int | None:
    """Return the most tokens that a model's positions allow; None where its configuration does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)
