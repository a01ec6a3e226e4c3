"""The loss of a step as executors see it: an objective with its totals, and the metrics that it gave."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from engines.execution.early_host_read import EarlyRead
from engines.execution.executor import Scores, Scoring
from engines.execution.metrics import MetricSum
from engines.execution.micro_batches import MicroBatch
from engines.execution.reductions import reduce_float64
from engines.experts.load_metrics import load_metrics
from seqpack.batches.objective import Objective
from seqpack.batches.schema import SEVERAL
from seqpack.batches.view import Totals


def check_objective(objective: Objective) -> None:
    """Raise ValueError naming what an objective lacks."""
    missing = [
        name
        for name in ("required_keys", "needs_entropy", "zero_gradient_rows", "__call__")
        if not hasattr(objective, name)
    ]
    if missing:
        raise ValueError(f"{type(objective).__name__} is no objective, it lacks {missing[0]}: see seqpack.Objective")


def scoring_of(objective: Objective, temperature: float) -> Scoring:
    """Return the scores that an objective reads; ValueError where it asks for several tokens in two ways."""
    tokens, top_k = getattr(objective, "needs_tokens", None), getattr(objective, "needs_top_k", 0)
    if tokens is not None and top_k:
        raise ValueError(f"{type(objective).__name__} has both needs_tokens and needs_top_k: one of them is read")
    return Scoring(temperature, objective.needs_entropy, tokens, top_k)


STEP_METRICS = frozenset(
    (
        *("mtp_loss", "mtp_accuracy"),
        *("loss", "auxiliary_loss", "grad_norm", "lr", "step", "tokens", "sequences", "trained_tokens"),
        *("computed_tokens", "computed_sequences", "micro_batches", "fill", "plan_hash", "skipped", "skipped_steps"),
    )
)
"""Metrics that a step reports itself, whatever its objective is."""


class StepLoss:
    """An `engines.execution.executor.LossFunction` that collects metrics as it is called."""

    def __init__(self, objective: Objective, totals: Totals, mtp_factor: float | None = None) -> None:
        """Take the totals of the step; `mtp_factor` weighs the loss of a head for multi-token prediction."""
        self.objective = objective
        self.totals = totals
        self.mtp_factor = mtp_factor
        self.metrics = MetricSum()
        self._load: Tensor | None = None

    def share(self, device: torch.device) -> Tensor:
        """Return the loss of this rank's micro-batches so far, f64[]; 0 on a rank that has none."""
        return self.metrics.sum_of("loss", device)

    def start(self, group: dist.ProcessGroup | None = None) -> Callable[[], dict[str, float]]:
        """Start to reduce the metrics; the function returned gives them, and the experts' load metrics. Collective."""
        metrics = self.metrics.start(group)
        if self._load is None:
            return metrics
        load = EarlyRead(reduce_float64(self._load, group))
        return lambda: {**metrics(), **load_metrics(load.read())}

    def __call__(self, micro_batch: MicroBatch, scores: Scores) -> Tensor:
        """Return the micro-batch's share of the loss, connected to its scores; ValueError where it is not a scalar."""
        log_probs, packed = scores.log_probs, micro_batch.packed
        if scores.several is not None:
            several = (x.t() for x in scores.several)
            packed = packed.with_values(**dict(zip(SEVERAL, several, strict=True)))
        loss, metrics = self.objective(log_probs, scores.entropy, packed, self.totals)
        if taken := STEP_METRICS & metrics.keys():
            raise ValueError(
                f"the objective reports {', '.join(sorted(taken))}, which the step reports itself: give another name"
            )
        if loss.shape != ():
            raise ValueError(f"an objective must return a scalar loss, its shape is {tuple(loss.shape)}")
        if scores.auxiliary is not None:
            loss = loss + scores.auxiliary
            metrics = {**metrics, "auxiliary_loss": scores.auxiliary}
        if scores.mtp is not None and self.mtp_factor is not None:
            # Cross entropy of the tokens that are trained, whatever the objective makes of them.
            mtp_loss = -scores.mtp.log_probs.sum() / self.totals.tokens
            loss = loss + self.mtp_factor * mtp_loss
            metrics = {**metrics, "mtp_loss": mtp_loss, "mtp_accuracy": scores.mtp.hits.sum() / self.totals.tokens}
        if not loss.requires_grad:  # an objective that ignored the log-probs of a dummy
            loss = loss + 0.0 * log_probs.sum()
        if scores.load is not None:
            self._load = scores.load.double() if self._load is None else self._load + scores.load
        self.metrics.add({**metrics, "loss": loss}, micro_batch.loss_weight)
        return loss
