"""A run that diverged ends with an error, and leaves no export."""

import math
from collections.abc import Mapping

WORSE_THAN_GUESSING = 10.0


class DivergenceError(ValueError):
    """A loss, a gradient or a weight is no number any more, or the model does far worse than guessing."""


def check_metrics(step: int, metrics: Mapping[str, float]) -> None:
    """Raise DivergenceError for the first metric of a step that is no finite number."""
    for name, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise DivergenceError(f"step {step}: {name} is {value}; lower --engine.lr, or set --engine.grad-clip")


def check_loss(step: int, nats: float, vocab_size: int) -> None:
    """Raise DivergenceError for a loss a token that is no number, or ten times that of guessing among all tokens."""
    limit = WORSE_THAN_GUESSING * math.log(vocab_size)
    if not nats <= limit:
        raise DivergenceError(
            f"step {step}: the held-out loss is {nats:.3g} nats a token, guessing has {math.log(vocab_size):.3g}; "
            "lower --engine.lr"
        )
