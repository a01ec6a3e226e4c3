"""The interface of an engine for its users."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, Unpack

import torch
from tensordict import TensorDict

from engines.capability import Supported, Unsupported
from engines.config import Adam
from engines.execution.local_batch import LocalBatch, RowStats
from engines.parallel.planning import StepPlan
from engines.weights.shard_export import WeightShard
from engines.weights.weight_pieces import WeightPiece
from seqpack.batches.objective import Objective
from seqpack.batches.view import BatchView

__all__ = ["Batch", "TrainEngine"]

Batch: TypeAlias = TensorDict | BatchView | LocalBatch
"""The whole batch, the same on every rank, or the rows of it that a rank holds."""


class TrainEngine(Protocol):
    """One policy and its optimizer over all ranks. Every method is collective: all ranks call it, in the same order.

    (Not `plan`, `rows_by_rank`, `row_stats`, `prefetch`, `supports` and `state_summary`, which are local.)
    """

    reference: "TrainEngine | None"
    """The frozen engine beside this one (`engines.build_reference`), where there is one; `engines.base_policy` scores
    by it, and keeps it in host memory otherwise."""

    def train_batch(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Make one optimizer step over the batch; the metrics are the same on every rank.

        `engines.NonFiniteError` where loss or gradient are not finite.
        """
        ...

    def forward_backward(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Add a batch's gradient to those since the last `optimizer_step`, and return its metrics."""
        ...

    def optimizer_step(self, **adam: Unpack[Adam]) -> dict[str, float]:
        """Update by the gradients that `forward_backward` added up; `adam` is of this update alone."""
        ...

    def prefetch(self, batch: Batch, objective: Objective) -> None:
        """Name the batch after the next, to be packed while the device works on the next."""
        ...

    def plan(self, lengths: Sequence[int], without: Collection[int] = ()) -> StepPlan:
        """Plan a step from the lengths of all rows of a batch, `without` some of them: which rank needs which rows."""
        ...

    def rows_by_rank(self, plan: StepPlan) -> tuple[tuple[int, ...], ...]:
        """Return the rows that each rank must hold for a plan."""
        ...

    def row_stats(self, batch: TensorDict | BatchView, objective: Objective) -> RowStats:
        """Return the counts of a batch, and its rows without a gradient; see `LocalBatch.stats`."""
        ...

    def forward(
        self,
        batch: Batch,
        entropy: bool = False,
        temperature: float | None = None,
        tokens: str | None = None,
        top_k: int = 0,
    ) -> TensorDict:
        """Score the batch's tokens: jagged `log_probs` (and `entropy`), aligned to input_ids, 0 at first tokens.

        `tokens`, a key of the batch, or `top_k` asks for several tokens at each too (`seqpack.batches.schema.SEVERAL`).
        """
        ...

    def export_weights(self, max_bytes: int = ..., live: bool = False) -> Iterator[WeightPiece]:
        """Yield the weights as a checkpoint holds them (`live`: as the trained module does), in pieces of max_bytes.

        A piece may be a view of the weights: read it before the next step.
        """
        ...

    def export_shards(self, live: bool = False) -> Iterator[WeightShard]:
        """Yield what this rank holds of `export_weights`, in place and without any collective; see `Engine`."""
        ...

    def save(
        self,
        directory: str | Path,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        also: Sequence[str | Path] = (),
    ) -> None:
        """Write model, optimizer, step, random state and `extra` (JSON); atomic; in the background without `wait`.

        `also`: further directories that then hold the same, in this order.
        """
        ...

    def saves_done(self) -> bool:
        """Return whether what `save` began is whole on disk. Local; it raises nothing: see `wait_for_saves`."""
        ...

    def wait_for_saves(self) -> None:
        """Wait until what `save` began is on disk, and raise what went wrong."""
        ...

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Read what `save` wrote, and return its `extra`."""
        ...

    def save_hf(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a directory that AutoModelForCausalLM.from_pretrained loads, in the source's dtypes or in `dtype`."""
        ...

    def offload(self) -> None:
        """Move weights and optimizer to host memory; nothing where they are there."""
        ...

    def onload(self) -> None:
        """Move weights and optimizer back to the device; nothing where they are there."""
        ...

    def supports(self, feature: str) -> Supported | Unsupported:
        """Return whether this engine has the feature, with its test or the reason."""
        ...

    def state_summary(self) -> dict[str, Any]:
        """Return plain facts for logs: parameters, layout, device, step."""
        ...
