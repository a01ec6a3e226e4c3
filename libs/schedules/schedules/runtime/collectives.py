"""Small collectives of Python objects over the ranks of a run; each is a no-op in a run of one rank."""

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and how many there are; (0, 1) outside any group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather_lists(mine: list[T]) -> list[T]:
    """Join the lists of all ranks in order of rank, on every rank."""
    rank, world = rank_and_world()
    if world == 1:
        return mine
    lists: list[list[T]] = [[] for _ in range(world)]
    lists[rank] = mine
    dist.all_gather_object(lists, mine)
    return [item for part in lists for item in part]


def all_agree(ok: bool) -> bool:
    """Return whether all ranks say so."""
    return all(gather_lists([ok]))


def broadcast_result(value: T) -> T:
    """Return rank 0's value on every rank: for what it reads from a disk that others may see later or not at all."""
    return gather_lists([value])[0]


def broadcast(value: T) -> T:
    """Return rank 0's value on every rank, one copy of it: for what may be large. Rank 0 need not wait for others."""
    box = [value]
    if rank_and_world()[1] > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]
