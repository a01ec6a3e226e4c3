"""Ranks of a gloo group as forked processes, for tests of what passes between them."""

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

SECONDS = 120
"""How long ranks wait for each other."""


def on_ranks(world: int, check: Callable[..., Any], *args: Any) -> list[Any]:
    """Run check(*args) on each of `world` ranks; return their results, plain data, in order of rank.

    Raises:
        RuntimeError: a rank raised, and its output says what.
    """
    context = multiprocessing.get_context("fork")
    with TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        ends = [context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            context.Process(target=_rank, args=(rank, world, store, ends[rank][1], check, args))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for _, ours in ends:
            ours.close()
        results, lost = [], []
        for rank, (answers, _) in enumerate(ends):
            try:
                results.append(answers.recv())
            except EOFError:
                lost.append(rank)
        for process in ranks:
            process.join()
    if lost:
        raise RuntimeError(f"ranks {lost} of {world} ended without a result")
    return results


def _rank(rank: int, world: int, store: Path, answer: Any, check: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    files = dist.FileStore(str(store), world)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS))
    answer.send(check(*args))
    answer.close()
    dist.barrier()  # one that has nothing to exchange would leave while others still connect
    dist.destroy_process_group()
