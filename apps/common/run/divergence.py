"""Divergence: a run that does far worse than guessing ends with an error and without an export."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from rollout import NotFiniteError


class DivergenceError(RuntimeError):
    """The loss is no number any more, or far above that of guessing."""


WORSE_THAN_RANDOM = 10.0


def check_loss(step: int, nats: float, vocab_size: int) -> None:
    """Raise DivergenceError for a loss a token that is not finite, or ten times that of guessing among all tokens.

    The engine refuses losses, gradients and weights that are not finite (`engines.NonFiniteError`); this is for those
    that still are.
    """
    guessing = math.log(vocab_size)
    if not nats <= WORSE_THAN_RANDOM * guessing:
        raise DivergenceError(
            f"step {step}: the held-out loss is {nats:.3g} nats a token where guessing has {guessing:.3g}; nothing is "
            "exported. Lower --learning-rate"
        )


@contextmanager
def name_sampler_errors(step: int) -> Iterator[None]:
    """Turn a sampler's NotFiniteError in a training step into a DivergenceError that names the step.

    Raises:
        DivergenceError: in place of the sampler's NotFiniteError.
    """
    try:
        yield
    except NotFiniteError as error:
        raise DivergenceError(
            f"step {step}: the sampler can't use the policy any more ({error}); nothing is exported. Lower "
            "--learning-rate"
        ) from error
