"""Supervised fine-tuning: cross-entropy on the trained tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from objectives.checks import check_choice, check_without_effect, gathered
from objectives.choices import Aggregation, check_loss_options
from seqpack.extensions.load_object import is_user_code

if TYPE_CHECKING:  # a command line makes these settings, and needs no torch for it
    from tensordict import TensorDict
    from torch import Tensor

    from seqpack.batches.packed import PackedBatch
    from seqpack.batches.view import BatchView, Totals

WEIGHTS = "loss_weights"
"""The key of the weights of tokens, which a batch may have."""


@dataclass(frozen=True)
class SFT:
    """-log pi of the trained tokens; by `aggregation` every token weighs the same ("token") or every sequence does.

    Where the batch has `loss_weights`, the loss of a token is multiplied by its own; what sums are divided by stays the
    number of trained tokens (as transformers' Trainer counts labels), so that weights of 1 change nothing.
    """

    aggregation: Aggregation = "token"
    loss: str = "nll"
    """The loss of a token: "nll", -log pi, or a function of `objectives.losses.PolicyTokens` (whose advantages are 1,
    and whose old policy is the present one), as FILE.py:NAME or package.module:NAME."""
    loss_options: tuple[str, ...] = ()
    """NAME=VALUE options of that function, by its signature."""

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise ValueError("; ".join(problems))

    def problems(self) -> list[str]:
        """Return a text for each problem."""
        options = partial(check_without_effect, "loss_options", self.loss_options or None, "loss 'nll' has none")
        if is_user_code(self.loss):
            options = partial(check_loss_options, self.loss, self.loss_options, "loss_options")
        return gathered(
            [
                partial(check_choice, "aggregation of SFT", self.aggregation, ("token", "sequence")),
                partial(check_choice, "loss", self.loss, ("nll", *([self.loss] if is_user_code(self.loss) else []))),
                options,
            ]
        )

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
        from objectives.objective import rows_without_gradient  # slow to load

        return rows_without_gradient(batch, WEIGHTS if WEIGHTS in batch.keys() else None)  # noqa: SIM118 (a TensorDict)

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch, totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss as `seqpack.Objective` defines it; the metrics are `nll`, the mean over tokens without
        their weights, and those of a loss of one's own."""
        from objectives.losses import aggregate, own_token_loss  # slow to load
        from objectives.objective import trained_mask  # slow to load
        from objectives.sums import pair, wide  # slow to load

        del entropy
        mask = trained_mask(batch)
        own: dict[str, Tensor] = {}
        per_token = -log_probs
        if self.loss != "nll":
            per_token, own = own_token_loss(self.loss, self.loss_options, log_probs, mask, batch)
        if (weights := batch.values.get(WEIGHTS)) is not None:
            per_token = wide(per_token) * weights
        loss = aggregate(
            per_token,
            mask,
            batch.cu_seqlens,
            self.aggregation,
            totals.tokens,
            totals.answers,
            row_tokens=batch.values.get("episode_tokens"),
        )
        return loss, {name: pair(value, mask) for name, value in (own | {"nll": -log_probs}).items()}
