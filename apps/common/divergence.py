"""A run that does far worse than guessing has diverged: it ends with an error, and leaves no export."""

import math


class DivergenceError(RuntimeError):
    """The loss is no number any more, or far above that of guessing."""


WORSE_THAN_GUESSING = 10.0


def check_loss(step: int, nats: float, vocab_size: int) -> None:
    """Raise DivergenceError for a loss a token that is no number, or ten times that of guessing among all tokens.

    The engine refuses losses, gradients and weights that are not finite (`engines.NonFiniteError`); this is for those
    that still are.
    """
    guessing = math.log(vocab_size)
    if not nats <= WORSE_THAN_GUESSING * guessing:
        raise DivergenceError(
            f"step {step}: the held-out loss is {nats:.3g} nats a token where guessing has {guessing:.3g}; nothing is "
            "exported. Lower --engine.lr"
        )
