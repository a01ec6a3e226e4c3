"""Two ranks in threads and two samplers in processes of their own: who passes what to whom, and how a loss ends it."""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from rollout.sync.boxes import Box
from rollout.testing.broadcasts import Pool, bytes_of, changed
from rollout.testing.listen_addresses import listen_addresses
from rollout.workers.authentication import AuthenticationError
from rollout.workers.channel import Message
from rollout.workers.collective import BrokenGroup
from rollout.workers.pool_shards import PoolShards, RankEnd, SentShards
from rollout.workers.process import WorkerDied
from rollout.workers.shard_exchange import HeldShard
from rollout.workers.shard_rendezvous import rendezvous_secret

SECRET = b"of the run, in at least 32 characters"
SECONDS = 120.0
"""Until a bucket counts as lost: longer than any of these tests."""
MOST = 1 << 12
VERSIONS = itertools.count(1)


class Rows:
    """Rows of a tensor that a rank has."""

    def __init__(self, name: str, whole: Tensor, rank: int) -> None:
        cut = (whole.shape[0] + 1) // 2
        first, count = (0, cut) if rank == 0 else (cut, whole.shape[0] - cut)
        self.name, self.shape, self.dtype = name, tuple(whole.shape), whole.dtype
        self.box = Box((first, *[0] * (whole.ndim - 1)), (count, *whole.shape[1:]))
        self.whole = whole.detach()

    def read(self, part: Any) -> Tensor:
        return self.whole[part.index]


def held_by(rank: int, model: Any) -> list[HeldShard]:
    return [Rows(name, tensor, rank) for name, tensor in model.named_parameters()]


class Meeting:
    """The samplers of a pool, and the ranks' ends."""

    def __init__(self, pool: Pool, secrets: tuple[bytes, bytes] = (SECRET, SECRET)) -> None:
        self.pool, self.why = pool, list[WorkerDied]()
        self.calls: list[tuple[int, str]] = []
        self.shards = PoolShards("gloo", self.ask, self.addresses, self.alive, self.why.append, SECONDS)
        self.place = self.shards.open(2)
        self.known = [rendezvous_secret(one, self.place) for one in secrets]
        self.follower: RankEnd | None = None
        self.meanwhile: Callable[[], None] = lambda: None

    def ask(self, index: int, name: str, arguments: Mapping[str, Any]) -> "Future[Message]":
        self.calls.append((index, name))
        return self.pool.ask(index, name, arguments)

    def addresses(self) -> tuple[str, list[str]]:
        return "127.0.0.1", ["127.0.0.1"] * len(self.pool.workers)

    def alive(self) -> bool:
        return not self.why and all(worker.alive for worker in self.pool.workers)

    def send(self, model: Any) -> list[Any]:
        """What both ranks return, or raise."""

        def follow() -> Any:
            self.follower = self.follower or RankEnd.of_follower(self.place, 1, self.known[1])
            return self.follower.send(held_by(1, model), MOST)

        with ThreadPoolExecutor(2) as threads:
            ranks = [threads.submit(self.shards.send, held_by(0, model), self.known[0], MOST), threads.submit(follow)]
            self.meanwhile()
            return [one.exception() or one.result() for one in ranks]

    def sync(self, model: Any) -> list[Any]:
        """Give the samplers a model's weights; what they told, and the plan."""
        version = next(VERSIONS)
        asyncio.run(self.pool.announced(version))
        sent, plan = self.send(model)
        assert isinstance(sent, SentShards), sent
        assert asyncio.run(sent.missing()) == 0
        asyncio.run(self.pool.all("commit", version=version))
        asyncio.run(self.pool.all("resume"))
        return [sent, plan]


@pytest.fixture(scope="module")
def processes() -> Iterator[Pool]:
    found = Pool("gloo", SECONDS, [None, None])
    yield found
    found.close()


@pytest.fixture
def doomed() -> Iterator[Pool]:
    """Samplers of which one will end."""
    found = Pool("gloo", SECONDS, [None, None])
    yield found
    found.close()


def test_each_rank_sends_its_own_boxes_straight_to_every_sampler(processes: Pool) -> None:
    """Twice in one group; nothing passes through the rank that has the pool but what it holds."""
    meeting = Meeting(processes)
    for seed in (1, 2):
        model = changed(seed)
        sent, plan = meeting.sync(model)
        assert asyncio.run(processes.all("weights")) == [bytes_of(model)] * 2
        assert sent.nbytes == len(bytes_of(model))
        held = [sum(one.box.numel for one in held_by(rank, model)) * 4 for rank in (0, 1)]  # type: ignore[attr-defined]
        for rank in (0, 1):
            out, taken = plan.bytes_of(rank)
            assert taken == 0
            assert out == pytest.approx(2 * held[rank], rel=0.05)
    assert [name for _, name in meeting.calls].count("join") == 2
    assert set().union(*listen_addresses(psutil.Process()).values()) == {"127.0.0.1"}
    meeting.shards.close()


def test_weights_that_a_sampler_refuses_leave_the_group_as_it_was(processes: Pool) -> None:
    meeting, model = Meeting(processes), changed(3)
    with torch.no_grad():
        next(model.parameters())[0, 0] = float("nan")
    asyncio.run(processes.announced(next(VERSIONS)))
    sent, _ = meeting.send(model)
    with pytest.raises(ValueError, match="not finite"):
        asyncio.run(sent.missing())
    asyncio.run(processes.all("abort"))
    meeting.sync(changed(4))
    assert not meeting.why
    meeting.shards.close()


def test_a_rank_with_another_secret_gives_nothing(processes: Pool) -> None:
    meeting = Meeting(processes, (SECRET, b"another one, of at least 32 characters"))
    asyncio.run(processes.announced(next(VERSIONS)))
    mine, other = meeting.send(changed(5))
    assert isinstance(mine, AuthenticationError | BrokenGroup)
    assert isinstance(other, AuthenticationError)
    assert "exchange" not in [name for _, name in meeting.calls]
    asyncio.run(processes.all("abort"))
    meeting.shards.close()


@pytest.mark.parametrize("when", ["before it joins", "while it takes weights"])
@pytest.mark.parametrize("killed", [True, False], ids=["killed", "its machine lost"])
def test_a_lost_sampler_ends_it_for_all(doomed: Pool, when: str, killed: bool) -> None:
    """A machine that is lost closes no connection: the pool's rank hears of it by other ways."""
    meeting, model = Meeting(doomed), changed(6)
    if when == "while it takes weights":
        meeting.sync(model)
    asyncio.run(doomed.announced(next(VERSIONS)))
    victim = psutil.Process(doomed.workers[1].process.pid)
    victim.suspend()

    def lose() -> None:
        time.sleep(1)
        if killed:
            victim.kill()
        else:
            meeting.why.append(WorkerDied("its node left the cluster"))

    meeting.meanwhile = lose
    mine, other = meeting.send(model)
    assert isinstance(other, BrokenGroup), other
    assert "was lost" in str(other) or "lost a process" in str(other), "nobody waited until a bucket counted as late"
    if isinstance(mine, SentShards):  # it had sent what it has, before
        with pytest.raises((BrokenGroup, WorkerDied)):
            asyncio.run(mine.missing())
    else:
        assert isinstance(mine, BrokenGroup)
    meeting.shards.fail("lost")
    assert meeting.why
    if not killed:
        victim.kill()
