"""The sender's end of a pool's broadcasts: it calls its samplers together, then gives each bucket to all at once."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from rollout.sync.pieces import Bucket
from rollout.workers.broadcast_receiver import MARK, device_for
from rollout.workers.bucket_messages import bucket_message, plain_bytes
from rollout.workers.channel import Message
from rollout.workers.collective import LOOPBACK, SECONDS, Backend, BrokenGroup, RendezvousStore, WeightGroup, waited
from rollout.workers.process import WorkerDied

SLACK = 5.0
"""Seconds beyond a group's own limit until waiting callers are given up, and until the cause of a death is known."""
Ask = Callable[[int, str, Mapping[str, Any]], "Future[Message]"]
"""Function that calls one sampler, by its number from 0."""


class PoolBroadcast:
    """The broadcasts to one pool of samplers. Once it is broken it stays so: the pool is to be replaced.

    Args:
        backend: what the bytes pass through.
        ask: calls a sampler.
        count: number of samplers.
        seconds: most seconds for making the group, or passing one bucket.
    """

    def __init__(self, backend: Backend, ask: Ask, count: int, seconds: float = SECONDS) -> None:
        self._backend, self._ask, self._count, self._seconds = backend, ask, count, seconds
        self._group: WeightGroup | None = None
        self.broken = False

    @property
    def met(self) -> bool:
        """Whether the group has been made."""
        return self._group is not None

    async def meet(self, host: str = LOOPBACK, hosts: Sequence[str] = ()) -> None:
        """Make the group. `host`: this process's address for all of them; `hosts`: each sampler's own.

        Raises:
            WorkerDied: it could not be made in time; the pool counts as dead.
        """
        device = device_for(self._backend)
        meeting = RendezvousStore(self._backend, self._count, host, self._seconds)
        rendezvous = meeting.rendezvous.message()
        mine = waited(lambda: meeting.join(device), "weights: meet")
        calls = [
            self._ask(i, "join", {"rendezvous": rendezvous, "rank": i + 1, "host": hosts[i] if hosts else LOOPBACK})
            for i in range(self._count)
        ]
        await self._results([mine, *calls], "meet", BaseException)
        self._group = mine.result()

    async def send(self, bucket: Bucket) -> int:
        """Stage a bucket on all samplers; return the largest number of missing elements.

        Raises:
            ValueError: a sampler refused the bucket, which all have received.
            WorkerDied: it did not reach all of them in time; the pool counts as dead.
        """
        group = self._group
        assert group is not None
        data = self._send_buffer(bucket)
        head = {**bucket_message(bucket, data), MARK: True}
        mine = waited(lambda: group.send(data), "weights: send")
        calls = [self._ask(i, "receive", head) for i in range(self._count)]
        answers = await self._results([mine, *calls], "take a bucket of weights", BrokenGroup)
        return max(int(head["answer"]["missing"]) for head, _ in answers[1:])

    def close(self) -> None:
        """End the group; waiting calls raise BrokenGroup."""
        self.broken = True
        if self._group is not None:
            self._group.abort()

    def _send_buffer(self, bucket: Bucket) -> Tensor:
        """Return the bucket's bytes on the device of the broadcast."""
        if self._backend == "gloo":
            return plain_bytes(bucket)
        assert self._group is not None
        return bucket.buffer.detach().to(self._group.device).contiguous()

    async def _results(self, futures: "Sequence[Future[Any]]", what: str, fatal: type[BaseException]) -> list[Any]:
        """Return the results of all, the sender's first; another error of one is raised once all have ended.

        Raises:
            WorkerDied: one raised what is `fatal` or a BrokenGroup, died or was late; the others are not waited for.
        """
        waits = [asyncio.ensure_future(asyncio.wrap_future(future)) for future in futures]
        whole = False
        try:
            broken = await self._until_broken(waits, (BrokenGroup, WorkerDied, fatal))
            whole = broken is None and all(wait.done() for wait in waits)
            if not whole:
                self.close()
                death = broken if isinstance(broken, WorkerDied) else await _death(waits)
                late = [i for i, wait in enumerate(waits) if not wait.done()]
                raise death or WorkerDied(self._told(what, broken, late)) from broken
        finally:
            if not whole:
                self.close()
            for wait in waits:
                wait.cancel()
        for error in map(_error, waits):
            if error is not None:
                raise error
        return [wait.result() for wait in waits]

    async def _until_broken(
        self, waits: "Sequence[asyncio.Future[Any]]", fatal: tuple[type[BaseException], ...]
    ) -> BaseException | None:
        """Wait for the first fatal error and return it; None when all have ended, or time is over."""
        pending, limit = set(waits), time.monotonic() + self._seconds + SLACK
        while pending and (left := limit - time.monotonic()) > 0:
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for error in map(_error, done):
                if isinstance(error, fatal):
                    return error
        return None

    def _told(self, what: str, broken: BaseException | None, late: Sequence[int]) -> str:
        if broken is not None:
            return f"the samplers did not all {what}: {broken}"
        names = ", ".join("the sender" if i == 0 else f"sampler {i - 1}" for i in late)
        return f"the samplers did not all {what} in {self._seconds:g} s: nothing came of {names}"


async def _death(waits: "Sequence[asyncio.Future[Any]]") -> WorkerDied | None:
    """Return a sampler's death, if one is reported soon: Ray reports it a moment after the group's sockets break."""
    limit = time.monotonic() + SLACK
    while True:
        died = [error for error in map(_error, waits) if isinstance(error, WorkerDied)]
        pending = [wait for wait in waits if not wait.done()]
        left = limit - time.monotonic()
        if died or not pending or left <= 0:
            return died[0] if died else None
        await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)


def _error(wait: "asyncio.Future[Any]") -> BaseException | None:
    return wait.exception() if wait.done() else None
