"""Context parallelism under FSDP2: sequences longer than one rank's tokens are computed by groups of ranks.

dyncp plans the groups of every step, static or dynamic; each rank runs the model on its shard of the group's packed
stream, and convolution, recurrence and attention go through dyncp. Only those exchange anything inside a group: weights
and gradients are FSDP's, the same number of collectives on every rank, because every rank has as many micro-batches as
there are steps.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dyncp.comm.process_groups import ProcessGroups
from dyncp.ops.attention import attention
from dyncp.ops.gated_delta_rule import causal_conv1d, gated_delta_rule
from dyncp.planning.cost import CostModel, Topology
from dyncp.planning.methods import Method
from dyncp.planning.planner import plan, static_plan
from dyncp.planning.sizes import Layout, sequence_align
from dyncp.sharding.layout import Sharding
from engines.config import EngineConfig, parse_context_parallel
from engines.execution.micro_batches import MicroBatch
from engines.inputs.model_inputs import ModelInputs, MTPInputs, PackedInputs
from engines.parallel.groups import ParallelGroups
from engines.parallel.planning import PlannedRows, StepPlan
from seqpack.adapters.context import PackedContext, positions_of
from seqpack.adapters.rotary import BY_LENGTH
from seqpack.batches.schema import ROUTED_EXPERTS


class ShardedOps:
    """The operations that mix tokens, over one group's shards: `seqpack.adapters.context.PackedOps`."""

    def __init__(self, sharding: Sharding, group: dist.ProcessGroup, method: Method) -> None:
        self.sharding = sharding
        self.group = group
        self.method = method

    def causal_conv1d(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, context: PackedContext, activation: str | None
    ) -> Tensor:
        """Run the depthwise convolution, with the halo from the rank to the left."""
        del context
        return causal_conv1d(x, weight, bias, self.sharding, self.group, activation)

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, context: PackedContext
    ) -> Tensor:
        """Run the recurrence, with the state from the ranks to the left."""
        del context
        return gated_delta_rule(q, k, v, g, beta, self.sharding, self.group)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        context: PackedContext,
        scale: float,
        window: int | None,
        **options: Any,
    ) -> Tensor:
        """Attend causally over the whole sequences."""
        del context
        if options or v.shape != k.shape:
            what = ", ".join(options) or "values of another width than keys"
            raise ValueError(f"{what} in attention is not implemented under context parallelism: leave that off")
        if window is not None:
            raise ValueError(f"sliding-window attention ({window}) is not implemented under context parallelism")
        layout = self.sharding.layout
        return attention(q, k, v, self.sharding, self.group, self.method, layout, scale)

    def by_rows(self, function: Callable[[Tensor], Tensor], x: Tensor, context: PackedContext) -> Tensor:
        """Refuse a layer whose own code sees whole sequences alone."""
        del function, x, context
        raise ValueError("a layer that runs as stock code, on rows, is not implemented under context parallelism")


@dataclass(frozen=True)
class ContextParallel:
    """The settings for groups of ranks that share sequences, on which planner and inputs must agree."""

    size: int | Literal["dynamic"]
    max_tokens: int
    plan_size: int
    cost: CostModel
    layout: Layout
    method: Method
    tensor_parallel: int = 1
    """Divisor of each rank's tokens: its tensor-parallel ranks take a part each between layers."""

    @staticmethod
    def of(config: EngineConfig, model_config: Any, plan_size: int) -> "ContextParallel":
        """Choose layout and method for the model. ValueError for a layer that cannot be sharded over a sequence."""
        text = model_config.get_text_config()
        _refuse_layers(text)
        cost = CostModel.from_config(text)
        return ContextParallel(
            parse_context_parallel(config.context_parallel),
            config.max_tokens_per_rank,
            plan_size,
            cost,
            "contiguous" if cost.delta_layers else "zigzag",
            "ulysses" if cost.query_heads // config.tensor_parallel % plan_size == 0 else "ring",
            config.tensor_parallel,
        )


class ContextParallelPlanner:
    """Groups of ranks share long sequences; short ones stay whole on one rank: `engines.parallel.planning.Planner`."""

    def __init__(self, settings: ContextParallel, groups: ParallelGroups | None = None) -> None:
        """Take the settings. `groups`: the run's, where several planes of ranks follow the same plan."""
        self.settings = settings
        self.topology = Topology()
        self.groups = ProcessGroups()
        if groups is not None and groups.layout.plan_size < groups.layout.world_size:
            planes = sorted({groups.layout.plan_ranks(rank) for rank in range(groups.layout.world_size)})
            self.groups = ProcessGroups(planes=planes, plane=groups.plan)

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """Plan steps of groups; a rank's micro-batches are its groups' samples."""
        chosen = self.settings
        shared: dict[str, Any] = {"method": chosen.method, "layout": chosen.layout, "align": chosen.tensor_parallel}
        common = (chosen.cost, self.topology)
        if chosen.size == "dynamic":
            made = plan(lengths, chosen.plan_size, chosen.max_tokens, *common, **shared)
        else:
            made = static_plan(lengths, chosen.plan_size, chosen.max_tokens, chosen.size, *common, **shared)
        ranks = tuple(
            tuple(
                PlannedRows(group.sample_ids, group.ranks if group.sample_ids else (index,))
                for group in (step.group_of(index) for step in made.steps)
            )
            for index in range(chosen.plan_size)
        )
        return StepPlan(ranks, tuple(lengths), int(made.hash[:13], 16), made.fill, made)

    def prepare(self, plan: StepPlan) -> None:
        """Make the plan's process groups."""
        assert plan.groups is not None
        self.groups.prepare(plan.groups)

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """See `Planner`; dyncp keeps the groups from one plan to the next."""
        return self.groups.get(ranks)


@dataclass(frozen=True)
class ShardedInputs(PackedInputs):
    """A rank's shard of a shared micro-batch; whole sequences where it is alone."""

    plan_index: int = 0
    layout: Layout = "contiguous"
    method: Method = "ring"
    tensor_parallel: int = 1

    def inputs(self, micro_batch: MicroBatch) -> ModelInputs:
        """Build the inputs: hidden state t - 1 scores token t, on whichever rank it is."""
        packed, ranks, group, wanted = micro_batch.packed, micro_batch.ranks, micro_batch.group, micro_batch.wanted
        if group is None:
            return super().inputs(micro_batch)
        place = ranks.index(self.plan_index)
        sharding, source = shard_stream(packed.lengths, place, len(ranks), self.layout, self.tensor_parallel)
        device = packed.cu_seqlens.device
        real = torch.as_tensor(source >= 0, device=device)
        index = torch.as_tensor(np.maximum(source, 0), device=device)
        following = (index + 1).clamp(max=packed.num_tokens - 1)
        rows = (real & (index + 1 < packed.num_tokens) & wanted[following]).nonzero().squeeze(1)
        ids = packed.values["input_ids"]
        local = sharding.local_cu_seqlens(place, device)
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
        seen = self.seen(micro_batch)
        if seen is not None and self.vision is not None:
            seen = seen.shard(index, real, packed.num_tokens, self.vision)
        experts = packed.values[ROUTED_EXPERTS][index] if self.replay else None
        return ModelInputs(
            *(ids[index], positions, rows, ids[slots], slots, packed.num_tokens, real, context),
            vision=seen,
            experts=experts,
            mtp=self._mtp(micro_batch, index, real) if self.mtp else None,
        )

    @staticmethod
    def _mtp(micro_batch: MicroBatch, index: Tensor, real: Tensor) -> MTPInputs:
        """Return the head's inputs: this rank's hidden states t (token index[t], where real[t]) score token t + 2."""
        packed, last = micro_batch.packed, micro_batch.packed.num_tokens - 1
        ids, second = packed.values["input_ids"], (index + 2).clamp(max=last)
        whole = (index + 2 <= last) & (packed.positions[second] >= 2)
        rows = (real & whole & micro_batch.wanted[second]).nonzero().squeeze(1)
        slots = second[rows]
        return MTPInputs(
            ids[(index + 1).clamp(max=last)], rows, ids[slots], slots, torch.ones_like(slots, dtype=torch.bool)
        )

    def collect(self, scores: Tensor, inputs: ModelInputs) -> Tensor:
        """Put scores at their slots and add those of the group's other ranks: the whole f32[T] on each of them."""
        flat = super().collect(scores, inputs)
        group = None if inputs.context is None else inputs.context.cp_group
        return flat if group is None else _SumOverGroup.apply(flat, group)

    def total(self, value: Tensor, inputs: ModelInputs) -> Tensor:
        """Return the sum over the group's ranks, on each of them."""
        group = None if inputs.context is None else inputs.context.cp_group
        return value if group is None else _SumOverGroup.apply(value, group)


def shard_stream(
    lengths: Sequence[int], cp_rank: int, cp_size: int, layout: Layout, multiple: int = 1
) -> tuple[Sharding, np.ndarray]:
    """Return (sharding of the padded stream, the place of each local token in the unpadded stream, -1 for padding).

    `multiple`: what the tokens of each rank are a multiple of.
    """
    align = sequence_align(cp_size, layout)
    bounds, source, start = [0], [], 0
    for length in lengths:
        padded = -(-length // align) * align
        bounds.append(bounds[-1] + padded)
        source += [np.arange(start, start + length), np.full(padded - length, -1)]
        start += length
    tail = -bounds[-1] % math.lcm(align, cp_size * multiple)
    if tail:
        bounds.append(bounds[-1] + tail)
        source.append(np.full(tail, -1))
    sharding = Sharding(tuple(bounds), cp_size, layout)
    return sharding, np.concatenate(source)[sharding.stream_index(cp_rank)]


class _SumOverGroup(torch.autograd.Function):
    """A sum over the group. The gradient passes unchanged: every rank computes the whole loss and keeps its part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # noqa: ARG004
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return grads[0], None


def _refuse_layers(text: Any) -> None:
    types = list(getattr(text, "layer_types", None) or [])
    if "sliding_attention" in types:
        raise ValueError(
            "context parallelism has no sliding-window attention yet and this model has such layers: "
            "use context_parallel='off'"
        )
    rope = getattr(text, "rope_parameters", None) or {}
    if any(part.get("rope_type") == BY_LENGTH for part in (rope, *rope.values()) if isinstance(part, dict)):
        raise ValueError(
            f"a rank that shares a sequence does not know its length, by which {BY_LENGTH} chooses rotary angles: use "
            "context_parallel='off'"
        )
