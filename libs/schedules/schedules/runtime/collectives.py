"""Small collectives of plain data over the ranks of a run, by JSON; each is a no-op in a run of one rank."""

from collections.abc import Sequence
from typing import TypeVar

import torch.distributed as dist

from seqpack.comm.collectives import broadcast_plain, gather_plain

T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and how many there are; (0, 1) outside any group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def gather_lists(mine: list[T], kinds: Sequence[type] = ()) -> list[T]:
    """Join the lists of all ranks in order of rank, on every rank.

    `kinds`: the dataclasses that they hold, if any (`seqpack.comm.plain`).
    """
    if rank_and_world()[1] == 1:
        return mine
    return [item for part in gather_plain(mine, kinds=kinds) for item in part]


def all_agree(ok: bool) -> bool:
    """Return whether all ranks say so."""
    return all(gather_lists([ok]))


def broadcast_result(value: T, kinds: Sequence[type] = ()) -> T:
    """Return rank 0's value on every rank: for what it reads from a disk that others may see later or not at all."""
    rank, world = rank_and_world()
    if world == 1:
        return value
    mine = [value] if rank == 0 else []
    return gather_lists(mine, kinds)[0]


def broadcast(value: T, kinds: Sequence[type] = ()) -> T:
    """Return rank 0's value on every rank, one copy of it: for what may be large. Rank 0 need not wait for others."""
    if rank_and_world()[1] == 1:
        return value
    result: T = broadcast_plain(value, kinds=kinds)
    return result
