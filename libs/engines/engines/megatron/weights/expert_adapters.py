"""Adapters on the experts of a rank: the map of their parameters, and their place in a module of experts.

As the experts' matrices, those of a rank's experts lie one below the other: `gate_up_proj_lora_A` [E r, H] and
`gate_up_proj_lora_B` [E 2 I, r], and so for `down_proj`. Experts that are cut themselves (expert tensor parallelism)
have none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engines.megatron.weights.bridge import Box, BoxMapping, MappedParameter, Shape


@dataclass(frozen=True)
class AdaptedStack:
    """The adapters of one matrix of all experts of a rank."""

    a: MappedParameter
    b: MappedParameter

    @property
    def module(self) -> str:
        """The name of the module of experts in its stage."""
        return self.a.name.rpartition(".")[0]


def pair_of_stack(stack: str) -> tuple[str, str]:
    """Return the names of a stacked parameter's adapter."""
    return f"{stack}_lora_A", f"{stack}_lora_B"


def adapted_stack(one: MappedParameter, shapes: Mapping[str, Shape]) -> AdaptedStack | None:
    """Map the adapters of a parameter of experts; None where it has none. `shapes` includes those of the adapters."""
    tensor = one.pieces[0].tensor
    names = pair_of_stack(tensor)
    if names[0] not in shapes:
        return None
    experts = [*dict.fromkeys(piece.source.start[0] for piece in one.pieces)]
    made = []
    for name, own in zip(names, pair_of_stack(one.name), strict=True):
        _, rows, columns = shapes[name]
        pieces = tuple(
            BoxMapping(name, Box((expert, 0, 0), (1, rows, columns)), Box((local * rows, 0), (rows, columns)))
            for local, expert in enumerate(experts)
        )
        shape = (len(experts) * rows, columns)
        made.append(MappedParameter(one.chunk, own, shape, pieces, one.counts, one.first, expert=True))
    return AdaptedStack(*made)


def add_stacks(stages: Sequence[nn.Module], stacks: Sequence[AdaptedStack], scale: float) -> list[Any]:
    """Give modules of experts these adapters, without values; return what switches them, one for each module."""
    switches = {}
    for one in stacks:
        module: Any = stages[one.a.chunk].get_submodule(one.module)
        for part in (one.a, one.b):
            options: dict[str, Any] = {"dtype": module.gate_up_proj.dtype, "device": module.gate_up_proj.device}
            parameter: Any = nn.Parameter(torch.zeros(part.shape, **options))
            parameter.allreduce = False  # summed over the ranks with the same experts, as `mark_experts` says
            module.register_parameter(part.name.rpartition(".")[2], parameter)
        switches[module] = module.adapters = module.adapters or Switch(scale)
    return [*switches.values()]


class Switch:
    """The factor of a module's adapters, and whether they are on."""

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.on = True
