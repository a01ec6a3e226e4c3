"""Load a causal LM from a directory, a config or a module, with what its exports are to hold."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from engines.config import EngineConfig
from engines.families.registry import family_of
from engines.weights.directory import ModelDirectory
from engines.weights.model_weights import ModelWeights

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolve_device(config: EngineConfig) -> torch.device:
    """The device of this rank; ValueError where it is not there."""
    kind = config.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device='cuda' but torch sees no CUDA device: use device='cpu' or 'auto'")
        return torch.device("cuda", torch.cuda.current_device())
    if kind == "npu":
        raise ValueError("device='npu' is not supported yet: no Ascend device was at hand to test on")
    return torch.device("cpu")


def compute_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """What the model computes in."""
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return _DTYPES[config.dtype]


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM in the master dtype, and what its exports are to hold."""

    module: Any
    weights: ModelWeights


def load_model(config: EngineConfig, model: Any = None) -> Any:
    """Load the module alone; see `load`."""
    return load(config, model).module


def load(config: EngineConfig, model: Any = None) -> LoadedModel:
    """Load the causal LM in the master dtype, on the CPU unless given elsewhere.

    `model` may be a module (used as it is), or a transformers config (random weights); otherwise config.model is a
    local directory. ValueError says what is wrong with either: a family that is not supported, a tensor that is
    missing, damaged or not known, before any weight is loaded.
    """
    dtype = _DTYPES[config.master_dtype]
    if model is not None and config.model is not None:
        raise ValueError("give a module or a config to build_engine, or a directory in EngineConfig.model, not both")
    if model is None and config.model is None:
        raise ValueError(
            "no model: set EngineConfig.model to a local directory, or hand a module or config to build_engine"
        )
    if config.model is not None:
        return _from_directory(Path(config.model), dtype)
    if isinstance(model, PretrainedConfig):
        family_of(model)
        module = AutoModelForCausalLM.from_config(model)
    elif isinstance(model, nn.Module):
        module = model
    else:
        raise ValueError(f"model must be a module or a transformers config, got {type(model).__name__}")
    if not hasattr(module, "get_output_embeddings") or not hasattr(module, "base_model"):
        raise ValueError(f"{type(module).__name__} is not a transformers causal LM (such as Qwen3_5ForCausalLM)")
    family = family_of(module.config)
    family.check_module(module)
    weights = ModelWeights.of(family, module)  # the dtypes before they are cast
    return LoadedModel(cast_parameters(module, dtype), weights)


def cast_parameters(model: Any, dtype: torch.dtype) -> Any:
    """Cast the parameters of a model in place, and leave its buffers: rotary frequencies must stay float32."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model


def _from_directory(directory: Path, dtype: torch.dtype) -> LoadedModel:
    config = read_config(directory)
    family = family_of(config)
    source = ModelDirectory.read(directory)
    with torch.device("meta"):
        ModelWeights.of(family, AutoModelForCausalLM.from_config(config), source)
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    family.check_module(module)
    return LoadedModel(module, ModelWeights.of(family, module, source))


def read_config(directory: Path) -> PretrainedConfig:
    """Read a model directory's config.json; ValueError says what is wrong with it."""
    if not directory.is_dir():
        raise ValueError(
            f"there is no model directory {directory}: give the path of a local one (nothing is downloaded)"
        )
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{directory} has no config.json: it is not a Hugging Face model directory (save_pretrained makes one)"
        )
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, KeyError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{directory / 'config.json'} cannot be read: {error}") from error
