"""Supervised fine-tuning: cross-entropy on the trained tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from objectives.checks import check_choice
from objectives.choices import Aggregation

if TYPE_CHECKING:  # a command line makes these settings, and needs no torch for it
    from tensordict import TensorDict
    from torch import Tensor

    from seqpack.batches.packed import PackedBatch
    from seqpack.batches.view import BatchView, Totals


@dataclass(frozen=True)
class SFT:
    """-log pi of the trained tokens; by `aggregation` every token weighs the same ("token") or every sequence does."""

    aggregation: Aggregation = "token"

    def __post_init__(self) -> None:
        check_choice("aggregation of SFT", self.aggregation, ("token", "sequence"))

    @property
    def required_keys(self) -> tuple[str, ...]:
        """The empty tuple: input_ids and loss_mask suffice."""
        return ()

    @property
    def needs_entropy(self) -> bool:
        """The need for entropies: always False."""
        return False

    def zero_gradient_rows(self, batch: TensorDict | BatchView) -> Tensor:
        """Return bool[B], rows without a trained token."""
        from objectives.objective import rows_without_gradient

        return rows_without_gradient(batch, advantages=False)

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch, totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss as `seqpack.Objective` defines it; the metric is `nll`, the mean over tokens."""
        from objectives.losses import aggregate
        from objectives.objective import trained_mask
        from objectives.sums import pair

        del entropy
        mask = trained_mask(batch)
        loss = aggregate(
            -log_probs,
            mask,
            batch.cu_seqlens,
            self.aggregation,
            totals.tokens,
            totals.answers,
            row_tokens=batch.values.get("episode_tokens"),
        )
        return loss, {"nll": pair(-log_probs, mask)}
