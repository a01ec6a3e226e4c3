"""The supervised loop: one batch and one optimizer step at a time, until the steps are done or the caller stops."""

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
    ahead: bool = False,
) -> Iterator[tuple[int, dict[str, float]]]:
    """Train on `batch_at(step)` for step in start..steps-1; yield (steps done, metrics) after each.

    The caller logs, evaluates and saves between the steps, and ends early by not asking for more. With `ahead` the next
    batch is made and packed while the device works on a step (`TrainEngine.prefetch`); it changes no result.

    Raises:
        engines.NonFiniteError: a loss or gradient is not finite, see `EngineConfig.on_nonfinite`.
    """
    batch = batch_at(start) if start < steps else None
    for step in range(start, steps):
        following = batch_at(step + 1) if ahead and step + 1 < steps else None
        if following is not None:
            engine.prefetch(following, objective)
        assert batch is not None
        yield step + 1, engine.train_batch(batch, objective)
        batch = following if following is not None or step + 1 == steps else batch_at(step + 1)
