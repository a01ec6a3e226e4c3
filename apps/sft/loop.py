"""The supervised loop: one batch and one optimizer step at a time, until the steps are done or the caller stops."""

from collections.abc import Callable, Iterator, Mapping

from tensordict import TensorDict

from engines import LocalBatch, TrainEngine
from seqpack import Objective, view_batch


def is_trained(batch: TensorDict | LocalBatch) -> bool:
    """Return whether some token of a batch is trained, on whatever rank."""
    if isinstance(batch, LocalBatch):
        assert batch.stats is not None
        return bool(batch.stats.totals.tokens)
    return bool(view_batch(batch).trained.any())


def idle_reason(metrics: Mapping[str, float]) -> str | None:
    """Return why a step of `fit` trained nothing, from its metrics; None where it did."""
    if not metrics["trained_tokens"]:
        return "no token of its batch is trained: the loss mask is empty"
    if metrics.get("skipped"):
        return "loss or gradient was not finite, and the update was skipped"
    return None if metrics["grad_norm"] else "the gradient is 0"


def fit(
    engine: TrainEngine,
    batch_at: Callable[[int], TensorDict | LocalBatch],
    objective: Objective,
    steps: int,
    start: int = 0,
    ahead: bool = False,
) -> Iterator[tuple[int, dict[str, float]]]:
    """Train on `batch_at(step)` for step in start..steps-1; yield (steps done, metrics) after each.

    A batch without a trained token makes no update; its metrics are `trained_tokens` and `tokens` alone. The caller
    logs, evaluates and saves between the steps, and ends early by not asking for more. With `ahead` the next
    batch is made and packed while the device works on a step (`TrainEngine.prefetch`); it changes no result.

    Raises:
        engines.NonFiniteError: a loss or gradient is not finite, see `EngineConfig.on_nonfinite`.
    """
    batch = batch_at(start) if start < steps else None
    for step in range(start, steps):
        following = batch_at(step + 1) if ahead and step + 1 < steps else None
        if isinstance(following, TensorDict) and is_trained(following):
            engine.prefetch(following, objective)
        assert batch is not None
        if is_trained(batch):
            yield step + 1, engine.train_batch(batch, objective)
        else:
            lengths = batch.lengths if isinstance(batch, LocalBatch) else view_batch(batch).lengths
            yield step + 1, {"trained_tokens": 0.0, "tokens": float(sum(lengths))}
        batch = following if following is not None or step + 1 == steps else batch_at(step + 1)
