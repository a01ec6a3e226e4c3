"""The model families of the lean pass, and the check whether it can replace a module's own forward."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.mistral.modeling_mistral import MistralForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

from rollout.native.decoders.media import tower_of
from rollout.native.lean.dense import read_dense
from rollout.native.lean.model_weights import ModelWeights
from rollout.native.lean.qwen3_5 import read_qwen3_5
from rollout.private_api import has_hooks


@dataclass(frozen=True)
class LeanFamily:
    """How to read the weights of a model class, and the number of axes of positions that its rotary module takes."""

    read: Callable[[nn.Module], ModelWeights]
    position_axes: int


_DENSE = LeanFamily(read_dense, position_axes=1)
_QWEN3_5 = LeanFamily(read_qwen3_5, position_axes=3)
_FAMILIES: dict[type[nn.Module], LeanFamily] = {
    Qwen3_5ForCausalLM: _QWEN3_5,
    Qwen3_5ForConditionalGeneration: _QWEN3_5,
    Qwen3ForCausalLM: _DENSE,
    Qwen2ForCausalLM: _DENSE,
    LlamaForCausalLM: _DENSE,
    MistralForCausalLM: _DENSE,
}
_FIXED_ROTARY = ("default", "llama3")
_PLAIN = {
    *(cls.__module__ for cls in (nn.Linear, nn.Embedding, nn.Conv1d, nn.ModuleList)),
    type(ACT2FN["silu"]).__module__,
}


def family_of(model: nn.Module) -> LeanFamily:
    """Return the family of a module. Raise ValueError where `refusal` names something that the lean pass lacks."""
    reason = refusal(model)
    if reason is not None:
        raise ValueError(f"the lean decoder cannot run this model: {reason}")
    return _FAMILIES[type(model)]


def refusal(model: nn.Module) -> str | None:
    """Return why the lean pass cannot replace this module's own forward, or None where it can.

    It reads weights, so nothing else may act: exact classes (an adapter replaces them), no hooks. A vision tower's own
    forward pass is called.
    """
    if type(model) not in _FAMILIES:
        names = ", ".join(sorted(cls.__name__ for cls in _FAMILIES))
        return f"it is written for {names}, not {type(model).__name__}"
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope not in _FIXED_ROTARY:
        return f"rotary type {rope!r} is not written, only {' and '.join(_FIXED_ROTARY)}"
    if getattr(config, "sliding_window", None) is not None:
        return f"a sliding window ({config.sliding_window}) is not written"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r} is not written, only silu"
    known = {*_PLAIN, type(model).__module__}
    tower = tower_of(model)
    seeing = set() if tower is None else set(tower.modules())
    for module in model.modules():  # their names cost as much again: a decoder is asked before every batch
        if module not in seeing and (type(module).__module__ not in known or has_hooks(module)):
            name = next(name for name, found in model.named_modules() if found is module)
            if type(module).__module__ not in known:
                return f"{name} is a {type(module).__name__}, which does not belong to the plain model"
            return f"{name or 'the model'} has hooks, which only its own forward runs"
    if len({p.dtype for p in model.parameters()}) > 1:
        return "its parameters are of more than one type"
    return None
