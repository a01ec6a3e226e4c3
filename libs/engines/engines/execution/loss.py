"""The loss of a step as executors see it: an objective with its totals, and the metrics that it gave."""

from torch import Tensor

from engines.execution.executor import Scores
from engines.execution.metrics import MetricSum
from engines.execution.micro_batches import MicroBatch
from seqpack.batches.objective import Objective
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


class StepLoss:
    """An `engines.execution.executor.LossFunction` that collects metrics as it is called."""

    def __init__(self, objective: Objective, totals: Totals) -> None:
        self.objective = objective
        self.totals = totals
        self.metrics = MetricSum()

    def __call__(self, micro_batch: MicroBatch, scores: Scores) -> Tensor:
        """Return the micro-batch's share of the loss, connected to its scores; ValueError where it is no scalar."""
        log_probs = scores.log_probs
        loss, metrics = self.objective(log_probs, scores.entropy, micro_batch.packed, self.totals)
        if loss.shape != ():
            raise ValueError(f"an objective must return a scalar loss, its shape is {tuple(loss.shape)}")
        if scores.auxiliary is not None:
            loss = loss + scores.auxiliary
            metrics = {**metrics, "auxiliary_loss": scores.auxiliary}
        if not loss.requires_grad:  # an objective that ignored the log-probs of a dummy
            loss = loss + 0.0 * log_probs.sum()
        self.metrics.add({**metrics, "loss": loss}, micro_batch.loss_weight)
        return loss
