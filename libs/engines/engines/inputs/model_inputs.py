"""The form in which a micro-batch enters a transformers model, and how its scores return to the micro-batch's tokens.

`PackedInputs` (the fast path) and `PaddedInputs` (the reference) keep whole sequences on one rank;
`engines.inputs.context_parallel` has the inputs of ranks that share sequences.
"""

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from engines.execution.micro_batches import MicroBatch
from engines.media.vision_inputs import VisionInputs
from engines.media.vision_settings import VisionSettings
from seqpack.adapters.context import LocalOps, PackedContext, PackedOps, positions_of
from seqpack.batches.schema import ROUTED_EXPERTS


@dataclass(frozen=True)
class MTPInputs:
    """The inputs of a head for multi-token prediction: `ids`, shaped as `input_ids`, is the token after each.

    Hidden state `rows[i]` predicts `targets[i]`, two tokens on, whose score belongs to token `slots[i]` of the packed
    micro-batch; where `valid` (bool) is not set no row has it two tokens before.
    """

    ids: Tensor
    rows: Tensor
    targets: Tensor
    slots: Tensor
    valid: Tensor


@dataclass(frozen=True)
class ModelInputs:
    """The model's inputs for one micro-batch, and which of its hidden states score which tokens.

    `input_ids`, `position_ids` [T] or [axes, T] with a `context` (packed); [B, L] or [axes, B, L] with an
    `attention_mask` (padded). Hidden state `rows[i]` (flattened tokens) predicts `targets[i]`, whose score belongs to
    token `slots[i]` of the packed micro-batch of `tokens` tokens. `counted` (bool, as many as hidden states) are the
    tokens that are no padding and no dummy's: those that a router's loss counts. `vision`: what a vision-language model
    sees, and where. `experts` i16[hidden states, layers, k]: those to take, -1 where the router chooses. `copies`
    i64[slots]: which of the scores belongs to each slot, where several slots share one. `read`: the distinct ones of
    `rows`, where several tokens are scored by one hidden state.
    """

    input_ids: Tensor
    position_ids: Tensor
    rows: Tensor
    targets: Tensor
    slots: Tensor
    tokens: int
    counted: Tensor
    context: PackedContext | None = None
    attention_mask: Tensor | None = None
    vision: VisionInputs | None = None
    experts: Tensor | None = None
    copies: Tensor | None = None
    read: Tensor | None = None
    mtp: MTPInputs | None = None


class InputBuilder(Protocol):
    """See the module's text. The same number of model calls follows on every rank."""

    def inputs(self, micro_batch: MicroBatch) -> ModelInputs:
        """Build the model's inputs on this rank; they score the tokens that are wanted."""
        ...

    def collect(self, scores: Tensor, inputs: ModelInputs) -> Tensor:
        """Return f32[T, ...] of the micro-batch from f32[N, ...] at `inputs.slots`; differentiable, 0 elsewhere."""
        ...

    def total(self, value: Tensor, inputs: ModelInputs) -> Tensor:
        """Return a sum over the micro-batch's tokens, from this rank's part of it; differentiable."""
        ...


@dataclass(frozen=True)
class PackedInputs:
    """The packed row as it is: token t is scored by the hidden state of token t - 1."""

    ops: PackedOps = LocalOps()  # noqa: RUF009 (frozen)
    vision: VisionSettings | None = None
    """Settings of a model that sees images: it then gets some in every call."""
    replay: bool = False
    """Whether tokens go to the experts that the batch names."""
    mtp: bool = False
    """Whether a head for multi-token prediction gets inputs."""

    def seen(self, micro_batch: MicroBatch) -> VisionInputs | None:
        """Return the images of a micro-batch; None for a text model."""
        return None if self.vision is None else VisionInputs.of(micro_batch.packed, self.vision, micro_batch.dummy)

    def inputs(self, micro_batch: MicroBatch) -> ModelInputs:
        """See `InputBuilder`."""
        packed = micro_batch.packed
        slots = micro_batch.wanted.nonzero().squeeze(1)
        ids = packed.values["input_ids"]
        positions = positions_of(packed.values, packed.position_ids)
        edges = tuple(packed.geometry.cu_seqlens)
        context = PackedContext(
            packed.cu_seqlens, packed.max_seqlen, ops=self.ops, edges=edges, positions=packed.positions
        )
        counted = packed.token_mask & (not micro_batch.dummy)
        seen = self.seen(micro_batch)
        experts = packed.values[ROUTED_EXPERTS] if self.replay else None
        # The id after a row's last token is another row's: no hidden state that scores a token sees it.
        before = slots - 2
        mtp = MTPInputs(ids.roll(-1), before.clamp(min=0), ids[slots], slots, packed.positions[slots] >= 2)
        return ModelInputs(
            *(ids, positions, slots - 1, ids[slots], slots, ids.numel(), counted, context),
            vision=seen,
            experts=experts,
            mtp=mtp if self.mtp else None,
        )

    def collect(self, scores: Tensor, inputs: ModelInputs) -> Tensor:
        """See `InputBuilder`."""
        each = scores if inputs.copies is None else scores.index_select(0, inputs.copies)
        return each.new_zeros(inputs.tokens, *each.shape[1:]).index_put((inputs.slots,), each)

    def total(self, value: Tensor, inputs: ModelInputs) -> Tensor:
        """See `InputBuilder`."""
        del inputs
        return value


@dataclass(frozen=True)
class PaddedInputs(PackedInputs):
    """The same micro-batch padded to rows: the reference path, in which the model is not touched."""

    def inputs(self, micro_batch: MicroBatch) -> ModelInputs:
        """Build right-padded rows with an attention mask."""
        flat, packed = super().inputs(micro_batch), micro_batch.packed
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
            counted=_scatter(flat.counted, place, rows, width).flatten(),
            context=None,
            attention_mask=mask.view(rows, width),
            vision=None if flat.vision is None else flat.vision.moved(place),
            experts=None if flat.experts is None else _padded_experts(flat.experts, place, rows * width),
            mtp=None
            if flat.mtp is None
            else replace(flat.mtp, ids=_scatter(flat.mtp.ids, place, rows, width), rows=place[flat.mtp.rows]),
        )


def _padded_experts(experts: Tensor, place: Tensor, tokens: int) -> Tensor:
    return experts.new_full((tokens, *experts.shape[1:]), -1).index_copy(0, place, experts)


def _scatter(values: Tensor, place: Tensor, rows: int, width: int) -> Tensor:
    out = values.new_zeros((*values.shape[:-1], rows * width))
    return out.index_copy(-1, place, values).view(*values.shape[:-1], rows, width)
