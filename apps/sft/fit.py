"""The supervised loop: batches in, one optimizer step each, until the steps are done or the caller has enough."""

from collections.abc import Callable, Iterator

from tensordict import TensorDict

from engines import TrainEngine
from seqpack import Objective


def fit(
    engine: TrainEngine,
    batch_at: Callable[[int], TensorDict],
    objective: Objective,
    steps: int,
    start: int = 0,
) -> Iterator[tuple[int, dict[str, float]]]:
    """Train on `batch_at(step)` for step in start..steps-1; yields (steps done, metrics) after each.

    The caller logs, evaluates and saves between the steps, and ends early by not asking for more.

    Raises:
        engines.NonFiniteError: a loss or gradient is not finite, see `EngineConfig.on_nonfinite`.
    """
    for step in range(start, steps):
        yield step + 1, engine.train_batch(batch_at(step), objective)
