"""The few things an app does across ranks; everything else is collective inside the engine."""

import os
import random
from typing import TypeVar

import torch
import torch.distributed as dist

from engines.launch import under_torchrun

T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    """This process's rank and how many there are; (0, 1) outside any group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def ranks_of_run(processes: int) -> int:
    """How many ranks a run will have: those that torchrun started, else those that the settings ask for."""
    return int(os.environ["WORLD_SIZE"]) if under_torchrun() else processes


def gather_lists(mine: list[T]) -> list[T]:
    """Join the lists of all ranks in order of rank, on every rank."""
    rank, world = rank_and_world()
    if world == 1:
        return mine
    lists: list[list[T]] = [[] for _ in range(world)]
    lists[rank] = mine
    dist.all_gather_object(lists, mine)
    return [item for part in lists for item in part]


def from_rank_0(value: T) -> T:
    """Rank 0's value on every rank: for what a rank reads from a disk that others may see later or not at all."""
    return gather_lists([value])[0]


def init_rank(threads: int, seed: int) -> None:
    """Set this rank's threads and global seeds, before anything is built."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    random.seed(seed)
