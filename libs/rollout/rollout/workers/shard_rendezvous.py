"""A group of a trainer's ranks and a pool's samplers, and what each of them does in a weight sync: `exchange`."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor

from rollout.sync.pieces import Bucket
from rollout.sync.shard_plan import SyncPlan
from rollout.workers.authentication import mac
from rollout.workers.collective import BrokenGroup, Rendezvous, WeightGroup, waited
from rollout.workers.shard_exchange import HeldShard, ShardExchange, ShardGroup, describe, plan_of

T = TypeVar("T")
LOOK_SECONDS = 0.2
"""Seconds between two looks whether a process of the group was lost."""
Lost = Callable[[], bool]


class RendezvousGroup(ShardGroup):
    """A group of ranks and samplers; what is lost in it is a BrokenGroup.

    `lost`: whether a process was, which is looked at while this one waits: a machine that is gone closes no connection,
    and gloo's waits can't be ended from outside.
    """

    def __init__(self, end: WeightGroup, lost: Lost | None = None) -> None:
        super().__init__(end.process_group, end.device, end.seconds)
        self._lost = lost

    def send(self, data: Tensor, target: int) -> Callable[[], None]:
        """Begin to send bytes; return what waits until they are on their way."""
        with _broken_where_lost():
            return super().send(data, target)

    def take(self, data: Tensor, source: int) -> Callable[[], None]:
        """Begin to receive bytes into `data`; return what waits until they are there."""
        with _broken_where_lost():
            return super().take(data, source)

    def gather(self, mine: bytes) -> list[bytes]:
        """Return the bytes of all processes, by rank; collective."""
        with _broken_where_lost():
            return super().gather(mine)

    def _waiter(self, work: Any) -> Callable[[], None]:
        waits, lost = super()._waiter(work), self._lost

        def wait_for() -> None:
            with _broken_where_lost():
                if lost is None:
                    waits()
                else:
                    wait_unless(lost, waited(waits, "weights: wait"))

        return wait_for


def wait_unless(lost: Lost, future: "Future[T]") -> T:
    """Return the result of work that runs in a thread; give it up where a process was lost, with a BrokenGroup."""
    while not future.done():
        wait([future], LOOK_SECONDS)
        if not future.done() and lost():
            raise BrokenGroup("a process of a weight sync was lost")
    return future.result()


@contextmanager
def _broken_where_lost() -> Iterator[None]:
    try:
        yield
    except BrokenGroup:
        raise
    except RuntimeError as error:  # torch has no narrower one for a peer that is gone
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BrokenGroup(f"the group of a weight sync lost a process: {first}") from error


def rendezvous_secret(secret: bytes, rendezvous: Rendezvous) -> bytes:
    """Return what the processes of a meeting prove to each other to know, of the run's secret."""
    return mac(secret, b"ranks and samplers", rendezvous.token.encode())


def exchange(
    end: WeightGroup, held: Sequence[HeldShard], wants: bool, max_bytes: int, lost: Lost | None = None
) -> tuple[SyncPlan, Iterator[Bucket]]:
    """Return the plan of a weight sync, and this process's part of it (`ShardExchange.buckets`); collective.

    `lost`: see `RendezvousGroup`.

    Raises:
        AuthenticationError: a process does not know the meeting's secret.
        BrokenGroup: one was lost, or late.
        ValueError: they contradict each other.
    """
    group = RendezvousGroup(end, lost)
    key = end.new_key(group.exchange)
    plan = plan_of(group, describe(held, wants), max_bytes)
    return plan, ShardExchange(plan, group, held, key).buckets()
