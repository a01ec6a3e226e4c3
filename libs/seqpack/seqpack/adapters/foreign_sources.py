"""What is known of other packages' streams as sources: where their own states are not exact, and who divides them.

`stream_sources_test.py` runs the names that are private to `datasets`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from seqpack.private_api import last_step, split_by_rank


def check_not_split(source: Any, world_size: int) -> None:
    """Raise ValueError where both the source and the stream would divide the samples among ranks."""
    if world_size > 1 and _of_hub(source) and split_by_rank(source):
        raise ValueError(
            "the source is split by rank already (split_dataset_by_node), and world_size would split it again: leave "
            "rank and world_size out, or hand over the whole dataset"
        )


def keeps_exact_state(source: Any) -> bool:
    """Return whether the source resumes exactly from a state of its own; any other is read again.

    A shuffle buffer of `datasets` loses what it holds, and its batched functions on tables may skip a batch.
    """
    if not (hasattr(source, "state_dict") and hasattr(source, "load_state_dict")):
        return False
    return not (_of_hub(source) and any(map(_loses_samples, _steps(source))))


def resumed(source: Any, state: Mapping[str, Any]) -> Iterator[Any]:
    """Return the iterator of the source from a state of its own. ValueError where the source is at another epoch."""
    epoch, own = state.get("epoch"), getattr(source, "epoch", None)
    if _of_hub(source) and epoch != own:
        raise ValueError(f"the state is of epoch {epoch} of the source, which is at {own}: call set_epoch({epoch})")
    source.load_state_dict(state)
    restarts = getattr(source, "restart_on_stop_iteration", False)  # torchdata's Loader: begins again at the end
    if not restarts:
        return iter(source)
    source.restart_on_stop_iteration = False
    try:
        return iter(source)
    finally:
        source.restart_on_stop_iteration = True


def fresh_iterator(source: Any) -> Iterator[Any]:
    """Return the iterator of the source from its beginning, whatever state was loaded for an iteration before."""
    if _of_hub(source) and hasattr(source, "load_state_dict"):
        source.load_state_dict({})  # the one that was loaded would hold for every iteration of its epoch
    return iter(source)


def _of_hub(source: Any) -> bool:
    return any(base.__module__.partition(".")[0] == "datasets" for base in type(source).__mro__)


def _steps(source: Any) -> Iterator[Any]:
    """Yield the steps of which a streamed dataset is made."""
    waiting = [last_step(source)]
    while waiting:
        step = waiting.pop()
        if step is not None:
            yield step
            waiting += [getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", ())]


def _loses_samples(step: Any) -> bool:
    tables = getattr(getattr(step, "formatting", None), "is_table", False) and getattr(step, "batched", False)
    return bool(tables) or type(step).__name__ == "BufferShuffledExamplesIterable"
