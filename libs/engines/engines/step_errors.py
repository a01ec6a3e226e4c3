"""Errors of a step that made no update."""

from typing import Any


class FailedStepError(RuntimeError):
    """A step made no update, and the run must end."""

    batch: Any = None
    """Batch of `train_batch`, where it was a step that failed."""


class NonFiniteError(FailedStepError):
    """A loss, gradient or weight is NaN or infinite: the run has diverged, and nothing of it should be exported."""


class LogProbDifferenceError(FailedStepError):
    """A sequence has other log-probs in a training pass than the stock model gives it alone: what trains is wrong."""
