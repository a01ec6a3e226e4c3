"""The few things an app does across ranks; everything else is collective inside the engine."""

import gc
import os
import random
from typing import TypeVar

import torch
import torch.distributed as dist

from apps.common.run.host_memory import keep_freed_memory, use_huge_pages
from engines.launch import under_torchrun

T = TypeVar("T")


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and how many there are; (0, 1) outside any group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def ranks_of_node(processes: int, nodes: int) -> int:
    """Return how many ranks each node of a run will have: torchrun's share of a node, else what the settings ask for.

    Raises:
        ValueError: torchrun's ranks are no multiple of the nodes.
    """
    if not under_torchrun():
        return processes
    ranks, rest = divmod(int(os.environ["WORLD_SIZE"]), nodes)
    if rest or not ranks:
        raise ValueError(
            f"torchrun started {os.environ['WORLD_SIZE']} ranks, which {nodes} nodes can't share evenly: set "
            "--cluster.pools.nodes to torchrun's --nnodes"
        )
    return ranks


def gather_lists(mine: list[T]) -> list[T]:
    """Join the lists of all ranks in order of rank, on every rank."""
    rank, world = rank_and_world()
    if world == 1:
        return mine
    lists: list[list[T]] = [[] for _ in range(world)]
    lists[rank] = mine
    dist.all_gather_object(lists, mine)
    return [item for part in lists for item in part]


def all_ranks(ok: bool) -> bool:
    """Return whether all ranks say so."""
    return all(gather_lists([ok]))


def from_rank_0(value: T) -> T:
    """Rank 0's value on every rank: for what a rank reads from a disk that others may see later or not at all."""
    return gather_lists([value])[0]


def sent_by_rank_0(value: T) -> T:
    """Rank 0's value on every rank, one copy of it: for what may be large. Rank 0 need not wait for the others."""
    box = [value]
    if rank_and_world()[1] > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def init_rank(threads: int, seed: int) -> None:
    """Set this rank's threads and global seeds, before anything is built."""
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    random.seed(seed)
    spare_the_collector()
    keep_freed_memory()
    use_huge_pages()


def spare_the_collector() -> None:
    """Keep Python's cycle collector from walking the imported packages again and again.

    A step makes some hundred thousand objects that live until its end, for which the collector by default walks all
    that was ever made, a million objects of torch and transformers among them: a third of a step of short answers.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
