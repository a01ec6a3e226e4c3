"""How long receivers were at a transfer, by a clock that the test has in hand."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rollout.sync import Bucket, Manifest, bucket_of, transfer_weights
from rollout.sync import transfer as module
from rollout.sync.pieces import BucketPiece


class Clock:
    """What the time is; it stands still unless it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


class Slow:
    """A receiver of two buckets: a second of work in each call, ten in `pause`, until what runs is finished."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._lacking = clock, 2

    async def prepare(self, manifest: Manifest) -> None:
        self._clock.now += 1

    async def receive(self, bucket: Bucket) -> int:
        self._clock.now += 1
        self._lacking -= 1
        return self._lacking

    async def commit(self, version: int) -> None:
        self._clock.now += 1

    async def abort(self) -> None:
        raise AssertionError("nothing is dropped")

    async def pause(self, mode: str = "finish") -> None:
        self._clock.now += 10

    async def resume(self) -> None:
        self._clock.now += 1


@pytest.mark.parametrize("pause", ["finish", "abort", None])
def test_staging_and_the_pause_are_timed_and_the_sender_is_not(pause: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)

    def exported() -> Iterator[Bucket]:
        for name in "ab":
            clock.now += 100  # the sender gathers its shards
            yield bucket_of(BucketPiece(name, (1,), torch.float32, 0, torch.ones(1)))

    times = asyncio.run(transfer_weights([Slow(clock)], Manifest(1), exported(), pause=pause))
    assert (times.staged_s, times.paused_s) == (3.0, 2.0)
