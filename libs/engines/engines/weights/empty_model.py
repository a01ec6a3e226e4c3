"""A model that takes no memory yet: parameters on the meta device, buffers with their final values."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from engines.families.family import Family
from engines.private_api import init_weights


def model_of(config: PretrainedConfig, whole: bool = False, **options: Any) -> Any:
    """Make the causal LM of a config, or the `whole` of its vision-language model."""
    auto = AutoModelForImageTextToText if whole else AutoModelForCausalLM
    return auto.from_config(config, **options)


def text_config(config: PretrainedConfig, family: Family) -> PretrainedConfig:
    """Return the config of the model that is trained on text, where transformers would make one with a vision tower.

    It is that of the whole where `family` trains the text part inside of the whole.
    """
    text = config.get_text_config()
    if text is config or family.inside or MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].config_class is not type(config):
        return config
    text = copy.deepcopy(text)
    text.tie_word_embeddings = config.tie_word_embeddings  # of the whole model
    return text


def meta_model(config: PretrainedConfig, dtype: torch.dtype, whole: bool = False) -> Any:
    """Build the model that transformers makes of a config on the meta device, buffers too; ValueError if it can't."""
    try:
        with torch.device("meta"):
            return model_of(config, whole, dtype=dtype)
    except (AssertionError, AttributeError, ImportError, LookupError, RuntimeError, TypeError) as error:
        raise ValueError(f"config.json describes a model that can't be built: {error}") from error


def empty_model(config: PretrainedConfig, dtype: torch.dtype, whole: bool = False, family: Family | None = None) -> Any:
    """Build the causal LM of a config, or the `whole` of its vision-language model, with meta parameters of this dtype;
    without what `family` does not train.

    Buffers that no checkpoint holds (rotary frequencies, an embedding's scale) are computed, on the CPU, by the code
    with which `from_pretrained` fills them: each module's part of `_init_weights`. ValueError for a config that
    describes no model, or a buffer that this code leaves alone.
    """
    model = meta_model(config, dtype, whole)
    if family is not None:
        family.reduce(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    saved = model.state_dict().keys()
    models = {prefix: part for prefix, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    for prefix, module in model.named_modules():
        owner = max((one for one in models if f"{prefix}.".startswith(f"{one}." if one else "")), key=len)
        _fill_buffers(models[owner], module, prefix, {name for name in saved if name.startswith(prefix)})
    return model


def allocate(model: nn.Module, device: torch.device) -> None:
    """Give meta parameters and buffers uninitialised memory on a device; tied ones stay tied. Others are moved."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta and parameter not in made:
                made[parameter] = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
            setattr(module, name, made.get(parameter, parameter))
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.empty_like(buffer, device=device) if buffer.is_meta else buffer)
    model.to(device)


def _fill_buffers(model: Any, module: nn.Module, prefix: str, saved: set[str]) -> None:
    buffers = {
        name: buffer
        for name, buffer in module.named_buffers(recurse=False)
        if f"{prefix}.{name}".removeprefix(".") not in saved
    }
    if not buffers:
        return
    left = ""
    for source in (module, model):  # Falcon-H1 fills buffers of its layers as a whole
        made = []
        for blank in (0, 1):  # an integer has no NaN: what stays as it was differs
            for name, buffer in buffers.items():
                value = torch.nan if buffer.is_floating_point() else blank
                setattr(module, name, torch.full_like(buffer, value, device="cpu"))
            init_weights(model, source)
            made.append([getattr(module, name) for name in buffers])
        pairs = zip(buffers, *made, strict=True)
        left = next((name for name, one, other in pairs if not torch.equal(one, other)), "")  # NaN equals nothing
        if not left:
            return
    raise ValueError(f"transformers says nothing of buffer {prefix}.{left}, which is in no checkpoint")
