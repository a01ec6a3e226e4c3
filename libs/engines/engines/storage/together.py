"""Work of all ranks whose error is an error of each: nobody waits for a rank that failed."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from seqpack.comm.collectives import gather_plain

Group = dist.ProcessGroup | None


def together(group: Group, work: Callable[[], Any], what: str = "cannot write the checkpoint") -> list[Any]:
    """Run this rank's part, and return the results of all ranks, or raise the error of one on every rank.

    `what`: what a rank cannot do, for the text of RuntimeError on the others.
    """
    result, error = None, None
    try:
        result = work()
    except (OSError, RuntimeError, ValueError) as caught:
        error = caught
    answers = gathered(group, (result if error is None else None, error and f"{type(error).__name__}: {error}"))
    if error is not None:
        raise error
    for rank, (_, text) in enumerate(answers):
        if text is not None:
            raise RuntimeError(f"rank {rank} {what}: {text}")
    return [result for result, _ in answers]


def gathered(group: Group, value: Any) -> list[Any]:
    """Return the values of all ranks, plain ones (`seqpack.comm.plain`); all of them wait here."""
    if this_world_size() == 1:
        return [value]
    return gather_plain(value, group)


def this_rank() -> int:
    """Return this process's rank, 0 outside any group."""
    return dist.get_rank() if dist.is_initialized() else 0


def this_world_size() -> int:
    """Return how many ranks there are, 1 outside any group."""
    return dist.get_world_size() if dist.is_initialized() else 1
