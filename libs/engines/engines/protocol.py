"""What an engine does for those who use it."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from tensordict import TensorDict

from engines.capability import No, Yes
from engines.execution.local_batch import LocalBatch
from engines.parallel.planning import StepPlan
from engines.weights.pieces import WeightPiece
from seqpack.batches.objective import Objective
from seqpack.batches.view import BatchView

__all__ = ["Batch", "TrainEngine"]

Batch: TypeAlias = TensorDict | BatchView | LocalBatch
"""The whole batch, the same on every rank, or the rows of it that a rank holds."""


class TrainEngine(Protocol):
    """One policy and its optimizer over all ranks. Every method is collective: all ranks call it, in the same order.

    (Not `plan`, `supports` and `state_summary`, which are local.)
    """

    def train_batch(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Make one optimizer step over the batch; the metrics are the same on every rank.

        `engines.NonFiniteError` where loss or gradient are not finite.
        """
        ...

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """Plan a step from the lengths of all rows of a batch: which rank needs which rows."""
        ...

    def forward(self, batch: Batch, entropy: bool = False, temperature: float | None = None) -> TensorDict:
        """Score the batch's tokens: jagged `log_probs` (and `entropy`), aligned to input_ids, 0 at first tokens."""
        ...

    def export_weights(self, max_bytes: int = ..., live: bool = False) -> Iterator[WeightPiece]:
        """Yield the weights as a checkpoint holds them (`live`: as the trained module does), in pieces of max_bytes."""
        ...

    def save(self, directory: str | Path) -> None:
        """Write model, optimizer, step and random state; atomic."""
        ...

    def load(self, directory: str | Path) -> None:
        """Read what `save` wrote."""
        ...

    def save_hf(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a directory that AutoModelForCausalLM.from_pretrained loads, in the source's dtypes or in `dtype`."""
        ...

    def offload(self) -> None:
        """Move weights and optimizer to host memory."""
        ...

    def onload(self) -> None:
        """Move them back."""
        ...

    def supports(self, feature: str) -> Yes | No:
        """Tell whether this engine has the feature."""
        ...

    def state_summary(self) -> dict[str, Any]:
        """Return plain facts for logs: parameters, layout, device, step."""
        ...
