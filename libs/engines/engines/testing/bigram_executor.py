"""An executor over the smallest language model there is: the logits of a token are a row of a table, float64, SGD.

Steps take a millisecond and their results can be written down by hand, for tests of what is above an executor.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from engines.capability import Supported, Unsupported
from engines.config import EngineConfig
from engines.execution.executor import LossFunction, Scores, Scoring, Several, TakeScores
from engines.execution.micro_batches import MicroBatch, MicroBatches
from engines.execution.optimizer import finite_on_all_ranks
from engines.parallel.groups import ParallelGroups


class Bigram(nn.Module):
    """P(next | token) = softmax(table[token])."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(vocab, vocab, generator=generator, dtype=torch.float64))

    @property
    def config(self) -> PretrainedConfig:
        """A config that says the vocabulary."""
        return PretrainedConfig(vocab_size=len(self.table))


class BigramExecutor:
    """See `engines.execution.executor.Executor`; `seen` collects the micro-batches of its training."""

    def __init__(self, groups: ParallelGroups, model: Bigram, trainable: bool = True, clip: float = 1e9) -> None:
        self.groups = groups
        self.model = model
        self.device = torch.device("cpu")
        self.trainable = trainable
        self.adds_loss = False
        self.compiled: Supported | Unsupported = Unsupported("a test's executor")
        self.updated_by = "a test's optimizer"
        self.clip = clip
        self.seen: list[MicroBatch] = []
        self.places: list[torch.device] = []
        self.auxiliary: float | None = None

    def ahead(self, micro_batches: MicroBatches) -> MicroBatches:
        """Return the micro-batches unchanged."""
        return micro_batches

    def train(self, micro_batches: MicroBatches, loss: LossFunction, scoring: Scoring, add: bool = False) -> None:
        """Sum the micro-batches' losses, and run one backward pass."""
        if not add:
            self.model.zero_grad()
        self.seen = list(micro_batches)
        assert len(self.seen) == len(micro_batches)
        total: Tensor = sum(loss(one, self._scores(one, scoring)) for one in self.seen)  # type: ignore[assignment]
        total.backward()

    @torch.no_grad()
    def score(self, micro_batches: MicroBatches, take: TakeScores, scoring: Scoring) -> None:
        """Score in the opposite order."""
        for micro_batch in reversed(list(micro_batches)):
            take(micro_batch, self._scores(micro_batch, scoring))

    def _scores(self, micro_batch: MicroBatch, scoring: Scoring) -> Scores:
        ids = micro_batch.packed.values["input_ids"]
        table = torch.log_softmax(self.model.table[ids.roll(1)] / scoring.temperature, dim=-1)
        log_probs = torch.where(micro_batch.wanted, table.gather(1, ids[:, None]).squeeze(1), 0.0)
        entropy = torch.where(micro_batch.wanted, -(table.exp() * table).sum(-1), 0.0)
        auxiliary = None if self.auxiliary is None else self.auxiliary * self.model.table.sum()
        several = None
        if scoring.tokens is not None or scoring.top_k:
            tokens = scoring.several(micro_batch.packed, torch.arange(len(ids)))
            tokens = table.topk(tokens).indices if isinstance(tokens, int) else tokens
            taken = (tokens[:, :, None] == torch.arange(table.shape[1])).any(1)
            chosen = table.gather(1, tokens.clamp(min=0)).masked_fill(tokens < 0, 0)
            several = Several(tokens, chosen, table.masked_fill(taken, -torch.inf).logsumexp(1))
        return Scores(log_probs, entropy if scoring.entropy else None, auxiliary, several=several)

    def optimizer_step(self, lr: float, loss: Tensor, adam: EngineConfig) -> Tensor:
        """Make one step of gradient descent."""
        del adam
        if not finite_on_all_ranks(loss, self.groups.world):
            return torch.tensor(torch.nan)
        gradient = self.model.table.grad
        assert gradient is not None
        norm = float(gradient.norm())
        if norm < float("inf"):
            with torch.no_grad():
                self.model.table.sub_(gradient, alpha=lr * min(1.0, self.clip / max(norm, 1e-30)))
        return torch.tensor(norm)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the table."""
        yield "table", self.model.table.detach()

    def state(self) -> dict[str, Any]:
        """Return the table."""
        return {"model": {"table": self.model.table.detach()}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Do nothing: the table was read in place."""

    def move(self, device: torch.device) -> None:
        """Record the device."""
        self.places.append(device)
