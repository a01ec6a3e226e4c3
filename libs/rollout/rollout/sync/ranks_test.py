"""New weights where every rank of a gloo group has an engine of its own, as a training run's ranks do: all or none."""

import asyncio
import multiprocessing
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from rollout.engine import Sampling
from rollout.native.engine import NativeEngine
from rollout.sync.manifest import Manifest
from rollout.sync.pieces import Bucket, BucketPiece, buckets
from rollout.sync.transfer import transfer_weights
from rollout.testing.model import tiny_model
from rollout.testing.pieces import pieces_of

WORLD = 3
GREEDY = Sampling(greedy=True, max_new_tokens=6)
POINTS = ["prepare", "receive", "nan", "commit"]


def small(seed: int) -> PreTrainedModel:
    torch.set_num_threads(1)
    return tiny_model(24, layers=2, seed=seed)


def all_reduce_ok(ok: bool) -> bool:
    votes = torch.tensor([int(ok)])
    dist.all_reduce(votes, op=dist.ReduceOp.MIN)
    return bool(votes.item())


class Faulty(NativeEngine):
    """Refuses one call, once; a commit after having done it."""

    fault = ""

    async def _call(self, name: str, argument: Any) -> Any:
        answer = await getattr(super(), name)(argument) if name == "commit" or self.fault != name else None
        if self.fault == name:
            self.fault = ""
            raise ValueError(f"{name} was made to fail")
        return answer

    async def prepare(self, manifest: Manifest) -> None:
        await self._call("prepare", manifest)

    async def receive(self, bucket: Bucket) -> int:
        missing: int = await self._call("receive", bucket)
        return missing

    async def commit(self, version: int) -> None:
        await self._call("commit", version)


def exported(seed: int, fault: str) -> Iterator[BucketPiece]:
    """A collective export: every rank must read it to its end, or the others wait for ever."""
    for number, piece in enumerate(pieces_of(small(seed).named_parameters())):
        dist.barrier()
        if fault == "nan" and number == 20:
            piece = piece._replace(flat=piece.flat * float("nan"))
        yield piece


def rank_main(rank: int, path: str, pipe: "Connection[Any, Any]", fault: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=WORLD)
    engine = Faulty(small(0))
    engine.fault = fault if rank == 1 else ""

    def ids() -> tuple[int, ...]:
        return asyncio.run(asyncio.wait_for(engine.generate([3, 5], GREEDY), 60)).ids

    def update(version: int, seed: int, fault: str = "") -> str | None:
        stream = buckets(exported(seed, fault), 4_000)
        work = transfer_weights([engine], Manifest(version), stream, pause=None, all_reduce_ok=all_reduce_ok)
        try:
            asyncio.run(work)
        except ValueError as error:
            return str(error)
        return None

    first = update(1, 1, fault if rank == 1 else "")
    kept = (engine.version, ids())
    second = update(2, 2)
    pipe.send((first, kept, second, (engine.version, ids())))
    dist.destroy_process_group()


def run(path: Path, fault: str) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rollout.native.engine", "rollout.testing.model", "torch.distributed"])
    pipes = [context.Pipe() for _ in range(WORLD)]
    ranks = [
        context.Process(target=partial(rank_main, r, str(path), pipes[r][1], fault), daemon=True) for r in range(WORLD)
    ]
    for process in ranks:
        process.start()
    try:
        assert all(pipe.poll(120) for pipe, _ in pipes)
        return [pipe.recv() for pipe, _ in pipes]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def answer_of(seed: int) -> tuple[int, ...]:
    return NativeEngine(small(seed)).generate_batch([[3, 5]], GREEDY)[0].ids


@pytest.mark.parametrize("fault", ["", *POINTS])
def test_all_ranks_take_the_weights_or_none_does(fault: str, tmp_path: Path) -> None:
    expected = {seed: answer_of(seed) for seed in range(3)}
    assert len(set(expected.values())) == 3
    for rank, (first, kept, second, last) in enumerate(run(tmp_path / "group", fault)):
        if not fault:
            assert (first, kept) == (None, (1, expected[1]))
        else:
            assert kept == (0, expected[0])
            assert "not taken" in first
            assert ("another process" in first) == (rank != 1)
        assert (second, last) == (None, (2, expected[2]))
