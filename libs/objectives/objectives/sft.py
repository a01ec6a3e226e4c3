"""Supervised fine-tuning: cross-entropy on the trained tokens."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from objectives.losses import Aggregation, aggregate
from objectives.objective import Counts, pair, silent, trained_mask

if TYPE_CHECKING:
    from tensordict import TensorDict

    from seqpack.batches.packed import PackedBatch


@dataclass(frozen=True)
class SFT:
    """-log pi of the trained tokens; by `aggregation` every token weighs the same ("token") or every sequence does."""

    aggregation: Aggregation = "token"

    def __post_init__(self) -> None:
        if self.aggregation not in ("token", "sequence"):
            raise ValueError(f"SFT's aggregation is 'token' or 'sequence', got {self.aggregation!r}")

    @property
    def required_keys(self) -> tuple[str, ...]:
        """Nothing beyond input_ids and loss_mask."""
        return ()

    @property
    def needs_entropy(self) -> bool:
        """It does not."""
        return False

    def zero_gradient_rows(self, batch: "TensorDict") -> Tensor:
        """bool[B]: rows without a trained token."""
        return silent(batch["loss_mask"])

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, batch: "PackedBatch", totals: Counts
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See `objectives.objective.Objective`; the metric is `nll`, the mean over tokens."""
        del entropy
        mask = trained_mask(batch)
        loss = aggregate(-log_probs, mask, batch.cu_seqlens, self.aggregation, totals.tokens, totals.sequences)
        return loss, {"nll": pair(-log_probs.detach(), mask)}
