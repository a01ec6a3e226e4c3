"""What an objective is: a picklable function of scored packed tokens, giving its share of the loss, and metrics.

Metrics reduce over micro-batches and ranks without knowing what they mean:
- a scalar tensor is summed;
- a tensor of shape (2,) is a (sum, count) pair: both are summed, and the reported value is sum / count;
- a key that ends in "/max" is a scalar whose maximum is taken.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tensordict import TensorDict

    from seqpack.batches.packed import PackedBatch


class Counts(Protocol):
    """The global counts an objective divides by; anything with these attributes will do."""

    @property
    def tokens(self) -> int: ...  # noqa: D102
    @property
    def sequences(self) -> int: ...  # noqa: D102
    @property
    def groups(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class Totals:
    """Counts over the whole global step, the same on every rank and for every micro-batch."""

    tokens: int
    """Trained tokens (loss_mask True, a sequence's first token never counted)."""
    sequences: int
    """Sequences with at least one trained token."""
    groups: int = 0
    """Groups with at least one trained token; 0 where the batch has no `group`."""

    @staticmethod
    def of(batch: "TensorDict") -> "Totals":
        """Count a whole batch (jagged `loss_mask`, optional `group`)."""
        trained = [int(row[1:].sum()) for row in batch["loss_mask"].unbind()]
        groups = batch["group"].tolist() if "group" in batch.keys() else []  # noqa: SIM118 (a TensorDict is no dict)
        used = {group for group, count in zip(groups, trained, strict=False) if count}
        return Totals(tokens=sum(trained), sequences=sum(count > 0 for count in trained), groups=len(used))


@runtime_checkable
class Objective(Protocol):
    """A loss over scored packed tokens."""

    @property
    def required_keys(self) -> tuple[str, ...]:
        """Keys of the batch the objective reads, besides input_ids and loss_mask; checked before anything runs."""
        ...

    @property
    def needs_entropy(self) -> bool:
        """Whether the engine has to compute entropies; otherwise it passes None."""
        ...

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, batch: "PackedBatch", totals: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(this micro-batch's share of the loss, metrics).

        `log_probs` and `entropy` are f32[T], right at trained tokens and 0 elsewhere.
        """
        ...


def trained_mask(batch: "PackedBatch") -> Tensor:
    """bool[T]: the tokens that train, which a sequence's first token never does."""
    mask = batch.values["loss_mask"].to(torch.bool)
    starts = batch.cu_seqlens[:-1].to(torch.int64)
    return mask.index_fill(0, starts[starts < mask.numel()], False)


def silent(loss_mask: Tensor, advantages: Tensor | None = None) -> Tensor:
    """bool[B]: rows of a jagged batch with no trained token (of an advantage other than 0, where given; NaN is
    other)."""
    from seqpack.batches.jagged import ragged

    rows = ragged(loss_mask)
    speaks = rows.values if advantages is None else rows.values & (ragged(advantages).values != 0)
    ends = torch.cat([speaks.new_zeros(1, dtype=torch.int64), speaks.cumsum(0)])
    starts = torch.tensor(rows.starts, device=ends.device)
    return ends[starts + torch.tensor(rows.lengths, device=ends.device)] == ends[starts]


def pair(values: Tensor, mask: Tensor) -> Tensor:
    """(sum over the mask, count of the mask) as a metric."""
    return torch.stack([torch.where(mask, values, 0.0).sum(), mask.sum().to(values.dtype)]).detach()
