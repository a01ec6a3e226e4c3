"""The layers of one transformers model by torch_npu's operators: an adaptation of that instance, with `undo()`.

Norms, gated MLPs and attention layers get a class of their own, a subclass with another forward; experts the entry
"npu_grouped_matmul" of transformers' table of implementations. Classes of other models stay as they are. Rotary
embedding is the function that a layer's stock code calls: that code runs over a table of names of its own.

A layer whose activation is not silu stays as it is: the operator has no other.
"""

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engines.config import EngineConfig
from engines.devices.adaptations import Adaptation, Applied, Patch, apply
from engines.devices.layer_matching import Forwards, is_silu, with_forward
from engines.devices.npu import torch_npu
from engines.devices.npu_operators import (
    VERSIONS,
    gated_rms_norm,
    grouped_matmul,
    rms_norm,
    rotary,
    swiglu,
    swiglu_halves,
)
from engines.families.registry import family_of

EXPERTS = "npu_grouped_matmul"
ROTARY = "apply_rotary_pos_emb"


def npu_operators_enabled(config: EngineConfig, device: torch.device) -> bool:
    """Return whether the operators of NPUs are used. ValueError where they are set off on a device that has none."""
    if config.npu_operators == "off" and device.type != "npu":
        raise ValueError(f"npu_operators is of device npu, this run is on {device.type}: leave it out")
    return device.type == "npu" and config.npu_operators == "auto"


def use_npu_operators(model: Any) -> Applied:
    """Make a registered transformers model on device npu compute by the NPU's operators, and return what was changed.

    ValueError for a torch_npu of another version.
    """
    return apply_to(model, Adaptation("NPU operators", "torch_npu", VERSIONS, lambda: list(_patches(model))))


def apply_to(model: nn.Module, adaptation: Adaptation) -> Applied:
    """Apply an adaptation to this instance, which stores it: once for each model, and freed with it."""
    applied = vars(model).setdefault("_adaptations", {})
    return apply(adaptation, installed=torch_npu().__version__, held=applied)


def _patches(model: Any) -> Iterator[Patch]:
    family = family_of(model.config)
    experts = []
    attention = {type(m): _attention(type(m)) for m in model.modules() if type(m).__name__ == family.attention}
    for module in model.modules():
        name = type(module).__name__
        if (forward := attention.get(type(module)) or _FORWARDS.of(module)) is not None:
            yield Patch(module, "__class__", with_forward(type(module), forward))
        elif name == family.experts and is_silu(module):
            experts.append(module)
    if experts:
        ALL_EXPERTS_FUNCTIONS.register(EXPERTS, _experts)
    for config in {id(module.config): module.config for module in experts}.values():
        yield Patch(config, "_experts_implementation", EXPERTS)


def _attention(kind: type[nn.Module]) -> Callable[..., Any] | None:
    """Return the stock forward with the operator's rotary embedding; None for a layer that calls no function of that
    name."""
    stock = inspect.unwrap(kind.forward)
    if not isinstance(stock, FunctionType) or ROTARY not in stock.__code__.co_names:
        return None
    names = {**stock.__globals__, ROTARY: rotary}
    own = FunctionType(stock.__code__, names, stock.__name__, stock.__defaults__, stock.__closure__)
    own.__kwdefaults__ = stock.__kwdefaults__
    return own


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _centred_norm(self: Any, x: Tensor) -> Tensor:
    return rms_norm(x.float(), 1.0 + self.weight.float(), self.eps).type_as(x)


def _gated_norm(self: Any, hidden_states: Tensor, gate: Tensor) -> Tensor:
    return gated_rms_norm(hidden_states, gate, self.weight, self.variance_epsilon)


def _mlp(self: Any, x: Tensor) -> Tensor:
    down: Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
    return down


_FORWARDS = Forwards(_norm, _centred_norm, _gated_norm, _mlp)


def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute a module of experts' forward: states [T, H], experts i64[T, k] and their weights [T, k] -> [T, H]."""
    flat, each = top_k_index.reshape(-1), top_k_index.shape[-1]
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(self.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
    tokens = order // each
    joined = grouped_matmul(hidden_states[tokens], self.gate_up_proj.transpose(1, 2), counts)
    outputs = grouped_matmul(swiglu_halves(joined), self.down_proj.transpose(1, 2), counts)
    weighted = (outputs * top_k_weights.reshape(-1)[order, None]).to(hidden_states.dtype)
    return torch.zeros_like(hidden_states).index_add(0, tokens, weighted)
