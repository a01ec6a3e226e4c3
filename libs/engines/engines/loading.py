"""Load a causal LM from a directory, a config or a module, with what its exports are to hold."""

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from engines.config import EngineConfig
from engines.devices.detect import devices_of
from engines.dtypes import DTYPES as DTYPES
from engines.dtypes import compute_dtype as compute_dtype
from engines.families.family import Family
from engines.families.own_family import use_own_family
from engines.mtp.head import add_head, head_of, refuse_head, trains_head
from engines.prove.admission import admitted_family
from engines.weights.disk_names import names_in
from engines.weights.disk_weights import DiskWeights
from engines.weights.empty_model import allocate, empty_model, meta_model, model_of, text_config
from engines.weights.hub import model_directory
from engines.weights.model_directory import ModelDirectory, refuse_adapter
from engines.weights.model_weights import ModelWeights
from engines.weights.stock_names import names_read
from engines.weights.tied_weights import untie_what_differs


def resolve_device(config: EngineConfig) -> torch.device:
    """Return the device of this rank; ValueError where there is none, or it lacks a dtype that is asked for."""
    devices = devices_of(config.device)
    if reason := devices.missing():
        raise ValueError(f"device={devices.kind!r} but {reason}: use device='cpu' or 'auto'")
    device = devices.current()
    dtypes = {"dtype": compute_dtype(config, device), "master_dtype": DTYPES[config.master_dtype]}
    dtypes["moments_dtype"] = DTYPES.get(config.moments_dtype, dtypes["master_dtype"])
    for setting, dtype in dtypes.items():
        if devices.missing_dtype(dtype):
            name = str(dtype).removeprefix("torch.")
            value = getattr(config, setting)
            without = "'auto'" if setting == "moments_dtype" and value != "auto" else "'float32'"
            raise ValueError(f"{setting}={value!r} is {name}, which {device} can't compute in: set {setting}={without}")
    return device


def device_of(config: EngineConfig, module: nn.Module) -> torch.device:
    """Return the device that a module is on, or will be on while it is empty."""
    device = next(module.parameters()).device
    return resolve_device(config) if device.type == "meta" else device


@dataclass(frozen=True)
class LoadedModel:
    """A causal LM in the master dtype, and what its exports hold."""

    module: Any
    weights: ModelWeights
    config: PretrainedConfig
    """The configuration as it was read or given: of a vision-language model the whole, also without its tower."""
    disk: DiskWeights | None = None
    """Values of the module on disk, while it is empty (on the meta device)."""


def load_model(
    config: EngineConfig, model: Any = None, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Any:
    """Load the module alone (see `load`) with parameters in the master dtype or in `dtype`, on the CPU or `device`; of
    transformers' own class, without a head for multi-token prediction, which is there to be trained.

    It is read there one tensor at a time; buffers keep their dtype (rotary frequencies must stay float32).
    """
    return _whole(open_model(replace(config, mtp_loss_scaling_factor=None), model), dtype, device).module


def empty_module(config: EngineConfig, dtype: torch.dtype) -> Any:
    """Make the module of `config.model` without memory for what a checkpoint holds (parameters on the meta device, of
    this dtype), for one that shares them (`engines.shared_parameters`); its other buffers are filled, on the CPU."""
    return cast_parameters(open_model(replace(config, mtp_loss_scaling_factor=None)).module, dtype)


def load(config: EngineConfig, model: Any = None) -> LoadedModel:
    """Load the causal LM whole in the master dtype, on the CPU unless given elsewhere; see `open_model`."""
    return _whole(open_model(config, model))


def open_model(config: EngineConfig, model: Any = None) -> LoadedModel:
    """Open the causal LM in the master dtype: what comes from a directory is empty, its values still on disk.

    `model` may be a module (used as it is), a transformers config (random weights), or a model that was opened before;
    otherwise config.model is a directory, or a name on the hub. ValueError says what is wrong with either: a family
    that is not supported, a tensor that is missing, damaged or not known, before any weight is read.
    """
    if isinstance(model, LoadedModel):
        return model
    use_own_family(config)
    dtype, seeing = DTYPES[config.master_dtype], config.vision != "off"
    if model is not None and config.model is not None:
        raise ValueError("give a module or a config to build_engine, or a directory in EngineConfig.model, not both")
    if model is None and config.model is None:
        raise ValueError(
            "no model: set EngineConfig.model to a local directory, or hand a module or config to build_engine"
        )
    if config.model is not None:
        return _from_directory(config, model_directory(config.model), dtype, seeing)
    if isinstance(model, PretrainedConfig):
        family = admitted_family(model, config.prove, config.allow_untested, config.batching)
        vision = family.check_vision(model) if seeing else None
        part = model if seeing else text_config(model, family)
        if trains_head(config):
            refuse_head(family, model)
        module = model_of(part, vision is not None or family.inside)
        family.reduce(module)
    elif isinstance(model, nn.Module):
        module = model
    else:
        raise ValueError(f"model must be a module or a transformers config, got {type(model).__name__}")
    if not hasattr(module, "get_output_embeddings") or not hasattr(module, "base_model"):
        raise ValueError(f"{type(module).__name__} is not a transformers causal LM (such as Qwen3_5ForCausalLM)")
    family = admitted_family(module.config, config.prove, config.allow_untested, config.batching)
    family.check_module(module)
    _check_replay(config, family, module.config)
    if trains_head(config):
        refuse_head(family, module.config)
        add_head(module)
    elif head_of(module) is not None:
        raise ValueError(
            "the module has a head (mtp) that nothing would train: set mtp_loss_scaling_factor, or take it off"
        )
    if seeing:
        family.check_vision(module.config)
    if family.sees(module) != seeing:
        raise ValueError(
            f"the module is a {type(module).__name__} and vision={config.vision!r}: 'off' is for text models, "
            "'frozen' and 'trained' for vision-language models"
        )
    weights = ModelWeights.of(family, module)  # the dtypes before they are cast
    return LoadedModel(cast_parameters(module, dtype), weights, module.config)


def cast_parameters(model: Any, dtype: torch.dtype) -> Any:
    """Cast the parameters of a model in place, and leave its buffers: rotary frequencies must stay float32."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model


def _check_replay(config: EngineConfig, family: Family, model: PretrainedConfig) -> None:
    """Raise ValueError for replayed experts on a model without experts, before anything is sampled."""
    if config.routing_replay and not family.router:
        raise ValueError(
            f"routing_replay is for models with experts, {model.get_text_config().model_type} has none: leave it off"
        )


def _from_directory(config: EngineConfig, directory: Path, dtype: torch.dtype, seeing: bool) -> LoadedModel:
    read = read_config(directory)
    family = admitted_family(read, config.prove, config.allow_untested, config.batching)
    if (unread := family.unread(read)) and (not dist.is_initialized() or dist.get_rank() == 0):
        warnings.warn(
            f"{directory / 'config.json'}: no model of transformers reads {', '.join(unread)}: ignored", stacklevel=2
        )
    _check_replay(config, family, read)
    vision = family.check_vision(read) if seeing else None
    if trains_head(config):
        refuse_head(family, read)
    source = ModelDirectory.read(directory)
    text = read if seeing else text_config(read, family)
    module = empty_model(text, dtype, vision is not None or family.inside, family)
    family.check_module(module)
    if trains_head(config):
        add_head(module, dtype)
    stock = module if text is read and not family.inside else meta_model(read, dtype, family.inside)
    names = names_in(source.tensors, module, stock)
    untie_what_differs(module, source, names)
    others = names_read(stock, source.tensors) if family.inside else ()
    weights = ModelWeights.of(family, module, source, names, others)
    if (directory / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(directory, local_files_only=True)
    return LoadedModel(module.eval(), weights, read, DiskWeights.of(weights, module))


def _whole(opened: LoadedModel, dtype: torch.dtype | None = None, device: torch.device | None = None) -> LoadedModel:
    """Read the values that are still on disk."""
    module = opened.module if dtype is None else cast_parameters(opened.module, dtype)
    if opened.disk is not None:
        allocate(module, device or torch.device("cpu"))
        opened.disk.fill(module)
    return LoadedModel(module if device is None else module.to(device), opened.weights, opened.config)


def read_config(directory: Path) -> PretrainedConfig:
    """Read a model directory's config.json; ValueError says what is wrong with it."""
    if not directory.is_dir():
        raise ValueError(
            f"there is no model directory {directory}: give the path of a local one, or OWNER/NAME of one on the hub"
        )
    refuse_adapter(directory)
    if not (directory / "config.json").is_file():
        raise ValueError(
            f"{directory} has no config.json: it is not a Hugging Face model directory (save_pretrained makes one)"
        )
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, KeyError, TypeError, StrictDataclassError) as error:
        raise ValueError(f"{directory / 'config.json'} cannot be read: {error}") from error
