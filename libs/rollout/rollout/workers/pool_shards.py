"""A weight sync shard to shard from a trainer's ranks straight to a pool's samplers, in one group of them all.

1. The first rank has the pool and opens a meeting (`PoolShards.open`): a store where all find each other. The other
   ranks hear of it among themselves, and know the run's secret; a sampler hears of it by a call, which has a secret of
   this meeting alone (`shard_rendezvous.rendezvous_secret`), so that samplers never learn the run's.
2. In each weight sync all authenticate anew, make the same plan and obey it (`exchange`): a rank sends its own boxes to
   each sampler, a sampler takes the model whole. Nothing passes through the first rank but what it holds itself.
3. Where one of them is lost, all end in seconds: a rank that notices it writes so into the store, and each rank looks
   there while it waits, and gives up. The pool is to be replaced then.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from rollout.sync.pieces import Bucket
from rollout.sync.shard_plan import SyncPlan
from rollout.workers.broadcast_receiver import device_for
from rollout.workers.channel import Message
from rollout.workers.collective import (
    SECONDS,
    Backend,
    BrokenGroup,
    Rendezvous,
    RendezvousStore,
    WeightGroup,
    connect,
    join,
    waited,
)
from rollout.workers.process import WorkerDied
from rollout.workers.shard_exchange import HeldShard
from rollout.workers.shard_rendezvous import exchange, wait_unless

ENDED = "ended"
"""Key of the store that says that the meeting is over."""
Ask = Callable[[int, str, Mapping[str, Any]], "Future[Message]"]
Addresses = Callable[[], tuple[str, Sequence[str]]]
"""Function that returns this process's address for all of the group, and each sampler's own."""


class RankEnd:
    """A rank's end of a meeting.

    Args:
        rendezvous: where.
        make: joins it, which waits for all others.
        alive: whether the pool is, of the rank that has it.

    Raises:
        BrokenGroup: not all came in time, or one was lost.
        AuthenticationError: one of them does not know the meeting's secret.
    """

    def __init__(
        self, rendezvous: Rendezvous, make: Callable[[], WeightGroup], alive: Callable[[], bool] | None = None
    ) -> None:
        self._alive = alive
        self._store = connect(rendezvous)  # of its own: a connection that waits does nothing else
        with self._telling():
            self._end = wait_unless(self._is_lost, waited(make, "weights: join"))

    @staticmethod
    def of_follower(rendezvous: Rendezvous, rank: int, secret: bytes) -> "RankEnd":
        """Return the end of a rank that has no pool; `secret`: the meeting's."""
        device, host = device_for(rendezvous.backend), own_address(rendezvous)
        return RankEnd(rendezvous, lambda: join(rendezvous, rank, host, device, secret))

    def send(self, held: Iterable[HeldShard], max_bytes: int) -> SyncPlan:
        """Send this rank's boxes by the plan that all make, and return it; collective. Raise what `exchange` does."""
        with self._telling():
            plan, stream = exchange(self._end, list(held), False, max_bytes, self._is_lost)
            deque(stream, maxlen=0)  # nothing comes
        return plan

    def abort(self) -> None:
        """End what waits, here; further calls fail."""
        self._end.abort()

    def _is_lost(self) -> bool:
        if self._alive is not None and not self._alive():
            return True
        try:
            return bool(self._store.check([ENDED]))
        except RuntimeError:  # the rank that had the store is gone
            return True

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell the other ranks of a loss: each of them waits for something else."""
        try:
            yield
        except BrokenGroup:
            with suppress(RuntimeError):  # the store is gone, too
                self._store.set(ENDED, "")
            raise


def own_address(rendezvous: Rendezvous) -> str:
    """Return the address of this machine from which it reaches a meeting, and by which the others reach it."""
    family, kind, protocol, _, place = socket.getaddrinfo(rendezvous.host, rendezvous.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:  # nothing is sent: the kernel chooses a way
        probe.connect(place)
        return str(probe.getsockname()[0])


@dataclass(frozen=True)
class SentShards(Bucket):
    """A bucket of no bytes here: the samplers have all of theirs, and say so."""

    pool: "PoolShards"
    answers: "Sequence[Future[Message]]"
    taken: int
    """Bytes of the weights, which each sampler took."""

    @property
    def nbytes(self) -> int:
        """The bytes of weights that a sampler got by it."""
        return self.taken

    async def missing(self) -> int:
        """Return the largest number of elements that a sampler lacks.

        Raises:
            ValueError: one of them refused the weights.
            BrokenGroup: it lost the group.
            WorkerDied: it is gone.
        """
        results = await asyncio.gather(*map(asyncio.wrap_future, self.answers), return_exceptions=True)
        errors = [one for one in results if isinstance(one, BaseException)]
        lost = [one for one in errors if not isinstance(one, ValueError)]
        if lost:
            self.pool.fail(f"a sampler lost the group of a weight sync: {lost[0]}")
        for error in [*lost, *errors]:
            raise error
        return max(int(head["answer"]["missing"]) for head, _ in results)  # type: ignore[misc]


class PoolShards:
    """The first rank's side: it opens the meeting of a pool's samplers with all ranks, and calls the samplers.

    Args:
        backend: what the bytes pass through.
        ask: calls a sampler.
        addresses: of this process and the samplers.
        alive: whether all samplers are.
        dead: is told why they are no longer to be used, where the group breaks.
        seconds: most seconds for making the group, or for a bucket.
    """

    def __init__(
        self,
        backend: Backend,
        ask: Ask,
        addresses: Addresses,
        alive: Callable[[], bool],
        dead: Callable[[WorkerDied], None],
        seconds: float = SECONDS,
    ) -> None:
        self._backend, self._ask, self._addresses = backend, ask, addresses
        self._alive, self._dead, self._seconds = alive, dead, seconds
        self._meeting: tuple[RendezvousStore, int, Sequence[str]] | None = None
        self._end: RankEnd | None = None
        self._joins: list[Future[Message]] = []

    def open(self, ranks: int) -> Rendezvous:
        """Return where all meet: so many ranks, this one as the first, and the samplers. Raise WorkerDied where one is
        gone."""
        if self._meeting is None:
            host, hosts = self._addresses()
            store = RendezvousStore(self._backend, ranks - 1 + len(hosts), host, self._seconds)
            self._meeting = store, ranks, hosts
        return self._meeting[0].rendezvous

    def send(self, held: Iterable[HeldShard], secret: bytes, max_bytes: int) -> SentShards:
        """Send this rank's boxes, as the others do by `RankEnd.send`; return what tells of the samplers.

        `secret`: the meeting's. Raise what `exchange` does.
        """
        assert self._meeting is not None, "open comes first"
        store, ranks, hosts = self._meeting
        if self._end is None:
            self._end = self._joined(store, ranks, hosts, secret)
        answers = [self._ask(i, "exchange", {"max_bytes": max_bytes}) for i in range(len(hosts))]
        plan = self._end.send(held, max_bytes)
        size = sum(spec.numel * spec.dtype.itemsize for spec in plan.specs.values())
        return SentShards((), torch.empty(0, dtype=torch.uint8), self, answers, size)

    def fail(self, why: str) -> None:
        """End the group, and have the pool replaced."""
        self._dead(WorkerDied(why))
        self.close()

    def close(self) -> None:
        """End the group."""
        if self._end is not None:
            self._end.abort()

    def _joined(self, store: RendezvousStore, ranks: int, hosts: Sequence[str], secret: bytes) -> RankEnd:
        message, device = store.rendezvous.message(), device_for(self._backend)
        for i, host in enumerate(hosts):
            told = {"rendezvous": message, "rank": ranks + i, "host": host, "secret": secret.hex()}
            self._joins.append(self._ask(i, "join", told))
        end = RankEnd(store.rendezvous, lambda: store.join(device, secret), self._is_whole)
        wait(self._joins, self._seconds)  # they have met, and are about to say so
        if not all(one.done() for one in self._joins) or not self._is_whole():
            raise BrokenGroup("a sampler was lost as soon as it had met the ranks")
        return end

    def _is_whole(self) -> bool:
        return self._alive() and not any(one.done() and one.exception() for one in self._joins)
