"""The protocols between an engine and those who use it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from engines.capability import No, Yes
from engines.weights.pieces import WeightPiece

if TYPE_CHECKING:
    from tensordict import TensorDict

    from seqpack.batches.packed import PackedBatch


@dataclass(frozen=True)
class StepTotals:
    """Counts over the whole global batch, given to the objective with every micro-batch.

    `tokens`: trained tokens; `sequences` and `groups`: those with at least one trained token.
    """

    tokens: int
    sequences: int
    groups: int = 0

    @staticmethod
    def of(batch: "TensorDict") -> "StepTotals":
        """Count a batch (jagged `loss_mask`, optional `group`)."""
        mask = batch["loss_mask"]
        counts = _row_sums(mask)
        groups = batch["group"].tolist() if "group" in batch.keys() else []  # noqa: SIM118 (a TensorDict is no dict)
        used = {group for group, count in zip(groups, counts, strict=False) if count}
        return StepTotals(tokens=sum(counts), sequences=sum(count > 0 for count in counts), groups=len(used))


def _row_sums(mask: Tensor) -> list[int]:
    """Trained tokens of each row of a jagged mask; the schema's check refused masks that train a first token."""
    from seqpack.batches.jagged import ragged

    rows = ragged(mask)
    ends = [0, *rows.values.cumsum(0).tolist()]
    return [ends[start + length] - ends[start] for start, length in zip(rows.starts, rows.lengths, strict=True)]


class Objective(Protocol):
    """What `train_batch` minimises; the objectives library has some, any callable of this shape will do.

    Optional attributes: `required_keys` (keys the batch must have), `needs_entropy` (False where it is missing) and
    `zero_gradient_rows(batch) -> bool[B]`, the rows that add nothing to loss and gradient whatever the policy is.
    The returned loss is this micro-batch's share: summed over micro-batches and ranks it is the loss. Metrics: a
    scalar is summed, a pair is (sum, count), and a key that ends in "/max" is a maximum.
    """

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, batch: "PackedBatch", totals: StepTotals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """(share of the loss, metrics) of one packed micro-batch; scores are f32[T], 0 where nothing is trained."""
        ...


class TrainEngine(Protocol):
    """One policy and its optimizer over all ranks. Every method is collective: all ranks call it, in the same order."""

    def train_batch(self, batch: "TensorDict", objective: Objective) -> dict[str, float]:
        """One optimizer step over the batch; the metrics, the same on every rank."""
        ...

    def forward(self, batch: "TensorDict", entropy: bool = False, temperature: float | None = None) -> "TensorDict":
        """Jagged `log_probs` (and `entropy`) of the batch's tokens, aligned to input_ids, 0 at first tokens."""
        ...

    def export_weights(self, max_bytes: int = ...) -> Iterator[WeightPiece]:
        """The weights under their Hugging Face names, in pieces of at most max_bytes."""
        ...

    def save(self, directory: str) -> None:
        """Write model, optimizer, step and random state; atomic."""
        ...

    def load(self, directory: str) -> None:
        """Read what `save` wrote."""
        ...

    def save_hf(self, directory: str) -> None:
        """Write a directory that AutoModelForCausalLM.from_pretrained loads."""
        ...

    def offload(self) -> None:
        """Move weights and optimizer to host memory."""
        ...

    def onload(self) -> None:
        """Move them back."""
        ...

    def supports(self, feature: str) -> Yes | No:
        """Whether this engine has the feature."""
        ...

    def state_summary(self) -> dict[str, Any]:
        """Plain facts for logs: parameters, world size, device, dtype, step."""
        ...
