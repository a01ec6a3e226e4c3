"""What an engine computes, as a proof compares it: log-probs, and gradients read off the weights that one step moved.

AdamW's first update is lr g / (|g| + eps) for a gradient g. So a step with lr = eps far above every gradient, without
clipping and decay, moves each weight by about its gradient: in any layout, read through the export of a checkpoint.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from engines.config import EngineConfig
from engines.protocol import TrainEngine
from engines.prove.comparison import Result
from seqpack.batches.batch import make_batch
from seqpack.batches.packed import PackedBatch
from seqpack.batches.view import BatchView, Totals

RATE = 1e4
"""Learning rate and epsilon. A gradient g then moves a weight by g / (1 + |g| / RATE), which is inverted."""
WEIGHTS = "proof_weights"


@dataclass(frozen=True)
class WeightedSum:
    """An objective: the sum of all log-probs, each times the weight that the batch holds for it."""

    required_keys: tuple[str, ...] = (WEIGHTS,)
    needs_entropy: bool = False

    def zero_gradient_rows(self, batch: TensorDict | BatchView) -> Tensor:
        """Return bool[B]: rows of one token, which score nothing."""
        lengths = batch.lengths if isinstance(batch, BatchView) else batch["input_ids"].offsets().diff().tolist()
        return torch.tensor([length == 1 for length in lengths])

    def __call__(
        self, log_probs: Tensor, entropy: Tensor | None, batch: PackedBatch, totals: Totals
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a micro-batch's share of the sum, and no metrics."""
        del entropy, totals
        return (log_probs * batch.values[WEIGHTS]).sum(), {}


def settings_of_proof(config: EngineConfig, **changes: Any) -> EngineConfig:
    """Return the configuration with an optimizer whose first update is the gradient, in float32 weights; with changes
    of other fields."""
    plain = {
        "model": None,
        "lr": RATE,
        "eps": RATE,
        "weight_decay": 0.0,
        "grad_clip": None,
        "learning_rates": (),
        "lr_schedule": "constant",
        "warmup_steps": 0,
        "total_steps": None,
        "min_lr_ratio": 0.0,
        "master_dtype": "float32",
        "moments_dtype": "auto",
        "optimizer": "adamw",
        "muon_momentum": EngineConfig.muon_momentum,
        "temperature": 1.0,
        "recheck_rows": 0,
    }
    return replace(config, **{**plain, **changes})


def proof_batch(rows: Sequence[Tensor]) -> TensorDict:
    """Return a batch of sequences i64[length] in which every token but first ones is scored, each with another weight.

    The weights are those of `engines.prove.comparison.stock`.
    """
    samples = []
    for ids, scored in zip(rows, proof_weights(rows).split([len(ids) - 1 for ids in rows]), strict=True):
        mask = torch.ones(len(ids), dtype=torch.bool)
        mask[0] = False
        samples.append({"input_ids": ids, "loss_mask": mask, WEIGHTS: torch.cat([scored.new_zeros(1), scored])})
    return make_batch(samples)


def proof_weights(rows: Sequence[Tensor]) -> Tensor:
    """Return f32[N], the weight of each token but first ones."""
    return torch.sin(torch.arange(sum(len(ids) - 1 for ids in rows), dtype=torch.float64)).float()


def engine_result(
    engine: TrainEngine,
    rows: Sequence[Tensor],
    trained: Callable[[TrainEngine], dict[str, Tensor]] | None = None,
    gain: float = 1.0,
) -> Result:
    """Return log-probs and gradients of an engine that `settings_of_proof` configured; it takes one step. Collective.

    `trained` reads what is trained off the engine: by default all weights (`live_weights`). `gain`: the learning rate
    divided by `RATE`. Names are those of the stock module's parameters; tied ones stand once.
    """
    batch, log_probs = proof_batch([row.cpu() for row in rows]), engine_log_probs(engine, rows)
    read = live_weights if trained is None else trained
    before = read(engine)
    engine.train_batch(batch, WeightedSum())
    moved = {name: (before[name].double() - value) / gain for name, value in read(engine).items()}
    return Result(log_probs, {name: move / (1 - move.abs() / RATE) for name, move in moved.items()})


def engine_log_probs(engine: TrainEngine, rows: Sequence[Tensor]) -> Tensor:
    """Return f32[N] on the host: log-probs of all tokens but first ones, as the engine scores them. Collective."""
    scores = engine.forward(proof_batch([row.cpu() for row in rows]))["log_probs"].unbind()
    return torch.cat([row[1:] for row in scores]).cpu()


def live_weights(engine: TrainEngine) -> dict[str, Tensor]:
    """Return all weights by the names of the stock module's parameters, whole, on the host. Collective."""
    return {
        piece.name: piece.flat.to("cpu", copy=True).view(piece.shape)
        for piece in engine.export_weights(max_bytes=2**62, live=True)
    }
