"""Context parallelism under FSDP2: sequences longer than one rank's tokens are computed by groups of ranks.

A strategy for the engine (see `engines.strategy`): dyncp plans the groups of every step, static or dynamic; each rank
runs the model on its shard of the group's packed stream, and convolution, recurrence and attention go through dyncp.
Only those exchange anything inside a group: weights and gradients are FSDP's, the same number of collectives on every
rank, because every rank has as many micro-batches as there are steps.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dyncp.comm.plan_hash import check_same_plan
from dyncp.comm.process_groups import ProcessGroups
from dyncp.ops.attention import attention
from dyncp.ops.gated_delta_rule import causal_conv1d, gated_delta_rule
from dyncp.ops.methods import Method
from dyncp.planning.cost import CostModel, Topology
from dyncp.planning.planner import plan, static_plan
from dyncp.planning.sizes import Layout, sequence_align
from dyncp.sharding.layout import Sharding
from engines.config import EngineConfig, parse_context_parallel
from engines.packing.context import PackedContext, positions_of
from engines.strategy import ModelInputs, PackedRows, StepPlan

if TYPE_CHECKING:
    from seqpack.batches.packed import PackedBatch


class ShardedOps:
    """The operations that mix tokens, over one group's shards: `engines.packing.context.PackedOps`."""

    def __init__(self, sharding: Sharding, group: dist.ProcessGroup, method: Method) -> None:
        self.sharding = sharding
        self.group = group
        self.method = method

    def causal_conv1d(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, context: PackedContext, activation: str | None
    ) -> Tensor:
        """The depthwise convolution, its halo from the rank to the left."""
        del context
        return causal_conv1d(x, weight, bias, self.sharding, self.group, activation)

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, context: PackedContext
    ) -> Tensor:
        """The recurrence, its state from the ranks to the left."""
        del context
        return gated_delta_rule(q, k, v, g, beta, self.sharding, self.group)

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, context: PackedContext, scale: float, window: int | None
    ) -> Tensor:
        """Causal attention over the whole sequences."""
        del context
        if window is not None:
            raise ValueError(f"sliding-window attention ({window}) is not implemented under context parallelism")
        layout = self.sharding.layout
        return attention(q, k, v, self.sharding, self.group, self.method, layout, scale)


class ContextParallelRows:
    """Groups of ranks share long sequences; short ones stay whole on one rank, as in `PackedRows`."""

    def __init__(self, config: EngineConfig, model_config: Any, rank: int, world_size: int) -> None:
        """ValueError where the model has a layer that context parallelism cannot take, or a static size does not divide
        the ranks.
        """
        text = model_config.get_text_config()
        self.kind = parse_context_parallel(config.context_parallel)
        if self.kind != "dynamic" and world_size % self.kind:
            raise ValueError(
                f"context_parallel='static:{self.kind}' needs a multiple of {self.kind} ranks, this run has "
                f"{world_size}: start another number of processes, or use 'dynamic'"
            )
        self.cap = config.max_tokens_per_rank
        self.rank, self.world_size = rank, world_size
        self.cost = CostModel.from_config(text)
        self.topology = Topology()
        self.layout: Layout = "contiguous" if self.cost.delta_layers else "zigzag"
        deals = self.cost.query_heads % world_size == 0
        self.method: Method = "ulysses" if deals else "ring"
        self.groups = ProcessGroups()
        self.whole = PackedRows(config.max_tokens_per_rank, rank, world_size)
        self._ranks: dict[tuple[int, ...], tuple[int, ...]] = {}
        _refuse_sliding_windows(text)

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """Steps of groups; this rank's micro-batches are its groups' samples. Collective: it makes process groups."""
        shared: dict[str, Any] = {"method": self.method, "layout": self.layout}
        if self.kind == "dynamic":
            made = plan(lengths, self.world_size, self.cap, self.cost, self.topology, **shared)
        else:
            made = static_plan(lengths, self.world_size, self.cap, self.kind, self.cost, self.topology, **shared)
        check_same_plan(made)
        self.groups.prepare(made)
        mine = [step.group_of(self.rank) for step in made.steps]
        self._ranks = {group.sample_ids: group.ranks for group in mine if group.sample_ids}
        return StepPlan(tuple(group.sample_ids for group in mine), int(made.hash[:13], 16), made.fill)

    def inputs(self, packed: "PackedBatch", wanted: Tensor) -> ModelInputs:
        """This rank's shard of the packed micro-batch; hidden state t - 1 scores token t, on whichever rank it is."""
        if "stand_in" in packed.extras:
            return _one_token(self.whole.inputs(packed, wanted))
        ranks = self._ranks[packed.indices]
        group = self.groups.get(ranks)
        if group is None:
            return self.whole.inputs(packed, wanted)
        sharding, source = shard_stream(packed.lengths, ranks.index(self.rank), len(ranks), self.layout)
        device = packed.cu_seqlens.device
        real = torch.as_tensor(source >= 0, device=device)
        index = torch.as_tensor(np.maximum(source, 0), device=device)
        following = (index + 1).clamp(max=packed.num_tokens - 1)
        rows = (real & (index + 1 < packed.num_tokens) & wanted[following]).nonzero().squeeze(1)
        ids = packed.values["input_ids"]
        local = sharding.local_cu_seqlens(ranks.index(self.rank), device)
        context = PackedContext(
            local,
            int(local.diff().max()),
            ops=ShardedOps(sharding, group, self.method),
            cp_group=group,
            layout=self.layout,
            plan=sharding,
        )
        slots = following[rows]
        positions = positions_of(packed.values, packed.position_ids)[..., index]
        return ModelInputs(ids[index], positions, rows, ids[slots], slots, packed.num_tokens, context)

    def collect(self, scores: Tensor, inputs: ModelInputs) -> Tensor:
        """Scores at their slots, those of the group's other ranks added: the whole f32[T] on each of them."""
        flat = scores.new_zeros(inputs.tokens).index_put((inputs.slots,), scores)
        group = _group_of(inputs)
        return flat if group is None else _SumOverGroup.apply(flat, group)

    def share(self, inputs: ModelInputs) -> float:
        """One over the size of the group: all its ranks compute the same loss and metrics."""
        group = _group_of(inputs)
        return 1.0 if group is None else 1.0 / dist.get_world_size(group)


def shard_stream(lengths: Sequence[int], cp_rank: int, cp_size: int, layout: Layout) -> tuple[Sharding, np.ndarray]:
    """(sharding of the padded stream, for each local token its place in the unpadded stream or -1 for padding)."""
    align = sequence_align(cp_size, layout)
    bounds, source, start = [0], [], 0
    for length in lengths:
        padded = -(-length // align) * align
        bounds.append(bounds[-1] + padded)
        source += [np.arange(start, start + length), np.full(padded - length, -1)]
        start += length
    tail = -bounds[-1] % cp_size
    if tail:
        bounds.append(bounds[-1] + tail)
        source.append(np.full(tail, -1))
    sharding = Sharding(tuple(bounds), cp_size, layout)
    return sharding, np.concatenate(source)[sharding.stream_index(cp_rank)]


class _SumOverGroup(torch.autograd.Function):
    """Sum over the group. The gradient is handed on as it is: every rank computes the whole loss and keeps its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None


def _group_of(inputs: ModelInputs) -> dist.ProcessGroup | None:
    return None if inputs.context is None else inputs.context.cp_group


def _one_token(inputs: ModelInputs) -> ModelInputs:
    """A stand-in cut to one token: it computes nothing that counts, and must not exceed the cap."""
    cu = torch.tensor([0, 1], dtype=torch.int32, device=inputs.input_ids.device)
    return replace(
        inputs,
        input_ids=inputs.input_ids[:1],
        position_ids=inputs.position_ids[..., :1],
        context=PackedContext(cu, 1),
    )


def _refuse_sliding_windows(text: Any) -> None:
    types = list(getattr(text, "layer_types", None) or [])
    if "sliding_attention" in types:
        raise ValueError(
            "context parallelism has no sliding-window attention yet and this model has such layers: "
            "use context_parallel='off'"
        )
