"""Adapters on stacked experts: two matrices an expert beside `gate_up_proj` [E, 2 I, H] and `down_proj` [E, H, I].

They are parameters of the module of experts, as those of a linear layer are its own: `gate_up_proj_lora_A` [E, r, H]
and so on, sharded along the experts like the weights. In files they have the names and shapes of peft's
`target_parameters`: A of all experts one below the other, and B with the experts last.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from engines.experts.adapted_experts import AdaptedExperts, LowRank, adapted_tokens
from engines.families.registry import family_of
from engines.lora_config import LoraConfig
from seqpack.adapters.subclasses import set_mixin

STACKED = ("gate_up_proj", "down_proj")
"""Names of stacked parameters, in the order in which peft wraps them."""


def adapted_stacks(model: Any, config: LoraConfig) -> dict[str, tuple[Any, tuple[str, ...]]]:
    """Return the modules of experts that are to have adapters, by name, each with its parameters that have one.

    ValueError for a name of `target_parameters` that no parameter of the model's experts has, for another activation
    than silu, or a rank that is larger than a matrix.
    """
    found: dict[str, tuple[Any, tuple[str, ...]]] = {}
    modules = _expert_modules(model) if config.target_parameters else {}
    for target in config.target_parameters:
        if not any(_named(f"{name}.{own}", target) for name in modules for own in STACKED):
            known = "experts.gate_up_proj, experts.down_proj" if modules else "none: it has no stacked experts"
            raise ValueError(f"lora target_parameters: there is no {target!r} in this model, but {known}")
    for name, module in modules.items():
        chosen = [own for own in STACKED if any(_named(f"{name}.{own}", t) for t in config.target_parameters)]
        for own in chosen:
            if config.rank > (smallest := min(getattr(module, own).shape[1:])):
                raise ValueError(f"lora rank {config.rank} is larger than {name}.{own}, which has {smallest} features")
        found |= {name: (module, tuple(chosen))} if chosen else {}
    if found and (act := model.config.get_text_config().hidden_act) != "silu":
        raise ValueError(f"lora target_parameters: experts with adapters are written for silu, this model has {act}")
    return found


def add_stacked(model: Any, config: LoraConfig, dtype: torch.dtype) -> tuple[str, ...]:
    """Add adapters of this dtype to stacked experts, without values; return the names of the parameters that have."""
    names = []
    for name, (module, chosen) in adapted_stacks(model, config).items():
        for own in chosen:
            weight = getattr(module, own)
            options: dict[str, Any] = {"dtype": dtype, "device": weight.device}
            experts, rows, columns = weight.shape
            for part, shape in (("A", (experts, config.rank, columns)), ("B", (experts, rows, config.rank))):
                module.register_parameter(f"{own}_lora_{part}", nn.Parameter(torch.zeros(shape, **options)))
            names.append(f"{name}.{own}")
        module.lora_scale, module.lora_on = config.scale, True
        set_mixin(module, LowRankExperts)
    return tuple(names)


class LowRankExperts(nn.Module):
    """The class of a module of experts that have adapters, before its stock class."""

    lora_scale: float
    lora_on: bool
    gate_up_proj: Tensor
    down_proj: Tensor

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the sum of each token's experts, with their adapters where these are on."""
        if not self.lora_on:
            stock: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
            return stock
        adapters = (low_rank_of(self, name, self.lora_scale) for name in STACKED)
        experts = AdaptedExperts(self.gate_up_proj, self.down_proj, *adapters)
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])
        return adapted_tokens(flat, top_k_index, top_k_weights, experts).view_as(hidden_states)


def low_rank_of(module: Any, name: str, scale: float) -> LowRank | None:
    """Return the adapter of a module's stacked parameter; None where it has none."""
    a, b = (getattr(module, f"{name}_lora_{part}", None) for part in "AB")
    return None if a is None or b is None else LowRank(a, b, scale)


def peft_tensors(adapters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield adapters (by live name) in peft's names and shapes; those of layers that are no stacks as they are.

    peft wraps a module once for each of its parameters: the first one's is inside, `base_layer` of the next.
    """
    for name, tensor in adapters.items():
        module, _, own = name.rpartition(".")
        parameter, _, part = own.rpartition("_lora_")
        if not parameter:
            yield name, tensor
            continue
        inside = parameter == STACKED[0] and f"{module}.{STACKED[1]}_lora_{part}" in adapters
        layer = f"{module}.base_layer" if inside else module
        yield f"{layer}.lora_{part}", tensor.flatten(0, 1) if part == "A" else tensor.permute(1, 2, 0).flatten(1)


def _expert_modules(model: Any) -> dict[str, Any]:
    family = family_of(model.config)
    inside = {module for layer in family.layers(model) for module in layer.modules()}
    return {
        n: m for n, m in model.named_modules() if family.experts and type(m).__name__ == family.experts and m in inside
    }


def _named(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
