"""Adapters (LoRA) beside megatron-core's linears, which join layers that transformers keeps apart.

Every layer of the transformers model keeps its own pair, under its own name: what is saved is what peft reads.

1. A linear that is cut by rows (`ColumnParallelLinear`) has as many A as layers are in it, one below the other, whole
   on every tensor-parallel rank; the rows of B go with the rows of the weight. Of its part of the tokens each rank
   makes A x, which is small, and gathers that.
2. A linear that is cut by columns (`RowParallelLinear`) has the columns of A that go with those of the weight, and B
   whole. A x is added up over the ranks, each keeps its part of the tokens, and B is applied to that.
3. What is whole on every rank sees a part of the tokens there: Megatron adds its gradient up over tensor-parallel
   ranks, as that of a norm (`sequence_parallel`).
4. Experts have adapters of their own (`engines.megatron.weights.expert_adapters`).
5. The rest is frozen. `adapted_linears` is a pure map of boxes, as `engines.megatron.weights.bridge`, of which exports,
   checkpoints and norms are made.

Invariants, each with a test: steps, files and exports are those of `engines.adapters.lora` under FSDP2 on one process;
without its adapters the model is the base, bit for bit.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn
from torch.nn import functional

from engines.adapters.base_digest import digest_of, sum_of_bits
from engines.adapters.lora import initial_values, is_adapter
from engines.lora_config import LoraConfig
from engines.megatron.weights.bridge import Box, BoxMapping, MappedParameter, Place, Shape
from engines.megatron.weights.expert_adapters import AdaptedStack, adapted_stack, add_stacks, pair_of_stack
from engines.megatron.weights.parameters import HeldParameter, Part, boxes_of

LINEARS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)


@dataclass(frozen=True)
class AdaptedLinear:
    """The adapters of one linear of a rank: the map of its parameters `lora_A` [n * rank, in], `lora_B` [rows, rank].

    `columns`: for each of the n layers in it the elements of the output that its rows of B are for.
    """

    a: MappedParameter
    b: MappedParameter
    columns: tuple[tuple[range, ...], ...]

    @property
    def linear(self) -> str:
        """The linear's name in its stage."""
        return self.a.name.rpartition(".")[0]


def refuse_layers(names: Iterable[str]) -> None:
    """Raise ValueError for transformers layers whose adapters have no counterpart under Megatron."""
    last = {name.rpartition(".")[2] for name in names}
    if other := sorted(last - set(LINEARS)):
        words = ", ".join(repr(name) for name in LINEARS if name in last)
        raise ValueError(
            f"lora targets: {', '.join(other)} can have no adapter under backend='megatron': name the others, "
            f"lora.targets=({words})"
        )


def with_adapters(shapes: Mapping[str, Shape], model: nn.Module) -> dict[str, Shape]:
    """Return the shapes of a model's tensors and of its adapters, each pair right before its weight."""
    adapters = {name: tuple(p.shape) for name, p in model.named_parameters() if is_adapter(name)}
    out: dict[str, Shape] = {}
    for name, shape in shapes.items():
        out |= {pair: adapters[pair] for pair in _pair(name) if pair in adapters}
        out[name] = shape
    return out


def _pair(weight: str) -> tuple[str, str]:
    if not weight.endswith(".weight"):
        return pair_of_stack(weight)
    layer = weight.removesuffix(".weight")
    return f"{layer}.lora_A", f"{layer}.lora_B"


def adapted_linears(
    held: Sequence[MappedParameter], shapes: Mapping[str, Shape], place: Place
) -> tuple[AdaptedLinear, ...]:
    """Map the adapters of a rank; `shapes` includes those of the adapters (`with_adapters`)."""
    linears = (_adapted(one, shapes, place) for one in held if not one.expert)
    return tuple(one for one in linears if one is not None)


def _adapted(one: MappedParameter, shapes: Mapping[str, Shape], place: Place) -> AdaptedLinear | None:
    weights = dict.fromkeys(piece.tensor for piece in one.pieces if _pair(piece.tensor)[0] in shapes)
    if not weights:
        return None
    a_pieces, b_pieces, columns, rows = [], [], [], 0
    cut = one.pieces[0].source.size[1] != shapes[one.pieces[0].tensor][1]  # by columns
    for number, weight in enumerate(weights):
        a, b = _pair(weight)
        rank, mine = shapes[a][0], [piece for piece in one.pieces if piece.tensor == weight]
        source = mine[0].source
        a_size = (rank, source.size[1])
        a_pieces.append(BoxMapping(a, Box((0, source.start[1]), a_size), Box((number * rank, 0), a_size)))
        for piece in mine:
            b_size = (piece.source.size[0], rank)
            b_pieces.append(BoxMapping(b, Box((piece.source.start[0], 0), b_size), Box((rows, 0), b_size)))
            rows += piece.source.size[0]
        starts = [(piece.place.start[0], piece.place.size[0]) for piece in mine]
        columns.append(tuple(range(start, start + size) for start, size in starts))
    counts = place.at.tp == 0
    linear = one.name.removesuffix(".weight")
    a_shape, b_shape = (len(weights) * rank, one.shape[1]), (rows, rank)
    held_a = MappedParameter(one.chunk, f"{linear}.lora_A", a_shape, tuple(a_pieces), cut or counts, place.first_copy)
    held_b = MappedParameter(
        one.chunk, f"{linear}.lora_B", b_shape, tuple(b_pieces), counts or not cut, place.first_copy
    )
    return AdaptedLinear(held_a, held_b, tuple(columns))


class LowRank:
    """A forward hook of a linear that adds its adapters' output. `on`: whether it does."""

    def __init__(self, linear: Any, columns: tuple[tuple[range, ...], ...], scale: float) -> None:
        self.scale = scale
        self.on = True
        self.split = bool(linear.sequence_parallel)
        self.by_rows = isinstance(linear, ColumnParallelLinear)
        self.group = linear.tp_group
        self.sizes = [sum(len(run) for run in runs) for runs in columns]
        order = [column for runs in columns for run in runs for column in run]
        self.order: Tensor | None = None
        if order != list(range(linear.weight.shape[0])):
            self.order = torch.tensor(order, device=linear.weight.device)

    def __call__(self, linear: Any, args: tuple[Any, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Add the adapters to `output` (W x [T, 1, rows], bias), for `args` (x [t, 1, in],)."""
        if not self.on:
            return output
        low = functional.linear(args[0].to(linear.lora_A.dtype), linear.lora_A)
        if self.split and self.by_rows:
            low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True, group=self.group)
        elif self.split:
            low = reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        parts = zip(low.chunk(len(self.sizes), dim=-1), linear.lora_B.split(self.sizes), strict=True)
        added = torch.cat([functional.linear(part, rows) for part, rows in parts], dim=-1)
        out, bias = output
        added = (added * self.scale).to(out.dtype)
        return out + added if self.order is None else out.index_add(-1, self.order, added), bias


class Adapters:
    """The adapters of all stages of a rank: `add` makes their parameters, without values."""

    def __init__(self, config: LoraConfig) -> None:
        self.scale = config.scale
        self.hooks: list[Any] = []
        """What has a switch `on`: hooks of linears, and modules of experts."""

    def added(
        self, stages: Sequence[Any], held: Sequence[MappedParameter], shapes: Mapping[str, Shape], place: Place
    ) -> tuple[MappedParameter, ...]:
        """Add adapters to a rank's stages, and return its map of parameters with them."""
        linears = adapted_linears(held, shapes, place)
        stacks = [stack for one in held if one.expert and (stack := adapted_stack(one, shapes)) is not None]
        self.add(stages, linears, stacks)
        every: list[AdaptedLinear | AdaptedStack] = [*linears, *stacks]
        return (*held, *(part for one in every for part in (one.a, one.b)))

    def add(self, stages: Sequence[Any], linears: Sequence[AdaptedLinear], stacks: Sequence[AdaptedStack] = ()) -> None:
        """Freeze the stages, and give these linears and experts adapters."""
        for stage in stages:
            stage.requires_grad_(False)
        for one in linears:
            linear = stages[one.a.chunk].get_submodule(one.linear)
            options: dict[str, Any] = {"dtype": linear.weight.dtype, "device": linear.weight.device}
            linear.lora_A = nn.Parameter(torch.zeros(one.a.shape, **options))
            linear.lora_B = nn.Parameter(torch.zeros(one.b.shape, **options))
            hook = LowRank(linear, one.columns, self.scale)
            (linear.lora_A if hook.by_rows else linear.lora_B).sequence_parallel = hook.split
            linear.register_forward_hook(hook)
            self.hooks.append(hook)
        self.hooks += add_stacks(stages, stacks, self.scale)
        adapted = {one.a.chunk for one in linears} | {one.a.chunk for one in stacks}
        for chunk, stage in enumerate(stages):
            if stage.pre_process and chunk not in adapted:
                stage.embedding.register_forward_hook(_has_gradient)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switch the adapters off inside the block: the model is the base alone."""
        for hook in self.hooks:
            hook.on = False
        try:
            yield
        finally:
            for hook in self.hooks:
                hook.on = True

    def merged(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the base's tensors, each with its adapter added, from tensors in the order of `with_adapters`."""
        pairs: dict[str, Tensor] = {}
        for name, tensor in tensors:
            a, b = _pair(name)
            if is_adapter(name):
                pairs[name] = tensor
            elif a in pairs:
                yield name, tensor + (pairs.pop(b) @ pairs.pop(a)) * self.scale
            else:
                yield name, tensor


def _has_gradient(_module: Any, _args: Any, hidden: Tensor) -> Tensor:
    """Let the hidden states of a first stage without adapters have a gradient: the schedule runs its backward pass."""
    return hidden.requires_grad_() if torch.is_grad_enabled() else hidden


class FirstValues(Mapping[str, Any]):
    """A model's tensors by name, adapters with their first values: the same under any layout and backend."""

    def __init__(self, tensors: Mapping[str, Any], shapes: Mapping[str, Shape], seed: int) -> None:
        self.tensors = tensors
        self.shapes = shapes
        self.seed = seed

    def __getitem__(self, name: str) -> Any:
        return initial_values(name, self.shapes[name], self.seed) if is_adapter(name) else self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def frozen_values(one: HeldParameter, dtypes: Mapping[str, torch.dtype]) -> tuple[Part, Tensor]:
    """Return what is kept of a frozen parameter, whole: itself, or a copy where its dtype on disk is more exact.

    `dtypes`: of the transformers tensors, where that matters. The copy is in host memory: only exports need it.
    """
    part, dtype = Part.whole(one), one.parameter.dtype
    for piece in one.held.pieces:
        dtype = torch.promote_types(dtype, dtypes.get(piece.tensor, dtype))
    if dtype == one.parameter.dtype:
        return part, part.values
    return part, torch.zeros(part.stop - part.start, dtype=dtype)


def frozen_digest(
    frozen: Iterable[tuple[Part, Tensor]],
    shapes: Mapping[str, Shape],
    dtypes: Mapping[str, torch.dtype],
    group: dist.ProcessGroup,
    device: torch.device,
) -> Tensor:
    """Return what `engines.adapters.base_digest.base_digest` returns for the same weights under FSDP2.

    `dtypes`: in the order of the transformers model's parameters. Collective over `group`.
    """
    sums = {name: torch.zeros((), dtype=torch.int64, device=device) for name in dtypes}
    for part, values in frozen:
        for name, box, elements in boxes_of(part, values) if part.owned else ():
            sums[name] += sum_of_bits(elements.to(device, dtypes[name]), box.start, shapes[name])
    return digest_of([(name, shapes[name], dtype) for name, dtype in dtypes.items()], list(sums.values()), group)
