"""Who computes what in a step, and in which form a micro-batch enters the model: the seam for context parallelism.

The engine asks a strategy three things: `plan` the step from the lengths, turn the rows of one micro-batch into model
`inputs`, and `collect` the scores the model returned at the rows' tokens. `PackedRows` and `PaddedRows` keep whole
sequences on one rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from engines.packing.context import LocalOps, PackedContext, PackedOps, positions_of

if TYPE_CHECKING:
    from seqpack.batches.packed import PackedBatch


@dataclass(frozen=True)
class StepPlan:
    """One rank's part of a step: `micro_batches` are tuples of batch rows, as many on every rank, some perhaps
    empty."""

    micro_batches: tuple[tuple[int, ...], ...]
    hash: int
    """The same on every rank, or the ranks disagree."""
    fill: float
    """True tokens over the capacity of all micro-batches of all ranks."""


@dataclass(frozen=True)
class ModelInputs:
    """What the model gets for one micro-batch, and which of its hidden states score which tokens.

    `input_ids`, `position_ids` [T] or [axes, T] with a `context` (packed); [B, L] or [axes, B, L] with an
    `attention_mask` (padded). Hidden state `rows[i]` (flattened tokens) predicts `targets[i]`, whose score belongs to
    token `slots[i]` of the packed micro-batch of `tokens` tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    rows: Tensor
    targets: Tensor
    slots: Tensor
    tokens: int
    context: PackedContext | None = None
    attention_mask: Tensor | None = None


class Strategy(Protocol):
    """See the module's text. All methods are deterministic, and the same number of model calls follows on every
    rank."""

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """This rank's part; the same lengths are given on every rank."""
        ...

    def inputs(self, packed: "PackedBatch", wanted: Tensor) -> ModelInputs:
        """Model inputs of a packed micro-batch; `wanted` bool[T] are the tokens to score (never a first one)."""
        ...

    def collect(self, scores: Tensor, inputs: ModelInputs) -> Tensor:
        """f32[T] of the packed micro-batch from the scores f32[N] at `inputs.slots`; differentiable, 0 elsewhere."""
        ...

    def share(self, inputs: ModelInputs) -> float:
        """This rank's share of the micro-batch's loss and metrics: below 1 where several ranks hold the same one."""
        ...


@dataclass(frozen=True)
class PackedRows:
    """Whole sequences, packed: data parallelism alone."""

    max_tokens: int
    rank: int = 0
    world_size: int = 1
    ops: PackedOps = LocalOps()  # noqa: RUF009 (frozen)

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """Balanced micro-batches under the cap, as many on every rank."""
        from seqpack.planning.micro_batches import plan_micro_batches

        plan = plan_micro_batches(lengths, self.max_tokens, self.world_size)
        mine = plan.ranks[self.rank]
        capacity = self.max_tokens * len(mine) * self.world_size
        return StepPlan(tuple(tuple(rows) for rows in mine), int(plan.hash), sum(lengths) / max(capacity, 1))

    def inputs(self, packed: "PackedBatch", wanted: Tensor) -> ModelInputs:
        """The packed row as it is: token t is scored by the hidden state of token t - 1."""
        slots = wanted.nonzero().squeeze(1)
        ids = packed.values["input_ids"]
        positions = positions_of(packed.values, packed.position_ids)
        context = PackedContext(packed.cu_seqlens, packed.max_seqlen, ops=self.ops)
        return ModelInputs(ids, positions, slots - 1, ids[slots], slots, ids.numel(), context)

    def collect(self, scores: Tensor, inputs: ModelInputs) -> Tensor:
        """Scores at their slots."""
        return scores.new_zeros(inputs.tokens).index_put((inputs.slots,), scores)

    def share(self, inputs: ModelInputs) -> float:
        """All of it."""
        del inputs
        return 1.0


@dataclass(frozen=True)
class PaddedRows(PackedRows):
    """The same plan with each micro-batch padded to rows: the reference path, in which the model is not touched."""

    def inputs(self, packed: "PackedBatch", wanted: Tensor) -> ModelInputs:
        """Right-padded rows with an attention mask."""
        flat = super().inputs(packed, wanted)
        lengths = packed.cu_seqlens.diff().to(torch.int64)
        rows, width = lengths.numel(), packed.max_seqlen
        device = flat.input_ids.device
        owner = torch.repeat_interleave(torch.arange(rows, device=device), lengths)
        place = owner * width + (
            torch.arange(flat.tokens, device=device) - packed.cu_seqlens[:-1].to(torch.int64)[owner]
        )
        mask = torch.zeros(rows * width, dtype=torch.int64, device=device).index_fill(0, place, 1)
        return replace(
            flat,
            input_ids=_scatter(flat.input_ids, place, rows, width),
            position_ids=_scatter(flat.position_ids, place, rows, width),
            rows=place[flat.rows],
            context=None,
            attention_mask=mask.view(rows, width),
        )


def _scatter(values: Tensor, place: Tensor, rows: int, width: int) -> Tensor:
    out = values.new_zeros((*values.shape[:-1], rows * width))
    return out.index_copy(-1, place, values).view(*values.shape[:-1], rows, width)
