"""From a directory, a config or a module to a causal LM on the right device."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from engines.config import EngineConfig
from engines.families.registry import family_of

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


def load_model(config: EngineConfig, model: Any = None) -> Any:
    """The causal LM in the master dtype, on the CPU unless given elsewhere.

    `model` may be a module (used as it is), or a transformers config (random weights); otherwise config.model is a
    local directory. ValueError says what is wrong with either.
    """
    if isinstance(model, nn.Module):
        if config.model is not None:
            raise ValueError("give a module to build_engine or a directory in EngineConfig.model, not both")
        loaded = model
    elif model is not None:
        loaded = _from_config(config, model)
    elif config.model is not None:
        loaded = _from_directory(Path(config.model), config)
    else:
        raise ValueError(
            "no model: set EngineConfig.model to a local directory, or hand a module or config to build_engine"
        )
    if not hasattr(loaded, "get_output_embeddings") or not hasattr(loaded, "base_model"):
        raise ValueError(f"{type(loaded).__name__} is not a transformers causal LM (such as Qwen3_5ForCausalLM)")
    family_of(loaded.config).check_module(loaded)
    return cast_parameters(loaded, _DTYPES[config.master_dtype])


def cast_parameters(model: Any, dtype: torch.dtype) -> Any:
    """Cast the parameters of a model in place, and leave its buffers: rotary frequencies must stay float32."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model


def _from_config(config: EngineConfig, model_config: Any) -> nn.Module:
    if not isinstance(model_config, PretrainedConfig):
        raise ValueError(f"model must be a module or a transformers config, got {type(model_config).__name__}")
    if config.model is not None:
        raise ValueError("give a config to build_engine or a directory in EngineConfig.model, not both")
    family_of(model_config)
    return AutoModelForCausalLM.from_config(model_config)


def _from_directory(directory: Path, config: EngineConfig) -> nn.Module:
    if not directory.is_dir():
        raise ValueError(
            f"there is no model directory {directory}: give the path of a local one (nothing is downloaded)"
        )
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{directory} has no config.json: it is not a Hugging Face model directory (save_pretrained makes one)"
        )
    family_of(AutoConfig.from_pretrained(directory, local_files_only=True))
    return AutoModelForCausalLM.from_pretrained(directory, dtype=_DTYPES[config.master_dtype], local_files_only=True)
