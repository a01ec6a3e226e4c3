"""Weights through a process group of a pool's own, gloo's, between real processes: bits, damage, deaths, hangs."""

import asyncio
import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from rollout.native.engine import NativeEngine
from rollout.testing.broadcasts import GREEDY, PROMPT, Pool, bytes_of, changed, large, parts_of
from rollout.testing.listen_addresses import listen_addresses
from rollout.workers.bucket_messages import plain_bytes
from rollout.workers.collective import BrokenGroup, Rendezvous, RendezvousStore, join, waited
from rollout.workers.collective_pool import SLACK
from rollout.workers.process import WorkerDied

SECONDS = 3.0
VERSIONS = itertools.count(1)
LARGE = 1 << 26
"""Bytes, more than sockets hold."""


@pytest.fixture(scope="module")
def processes() -> Iterator[Pool]:
    found = Pool("gloo", SECONDS, [None, None])
    yield found
    found.close()


@pytest.fixture
def pool(processes: Pool) -> Iterator[Pool]:
    """Samplers that live, and join a group of each test's own."""
    processes.new_group()
    yield processes
    processes.broadcast.close()


@pytest.fixture
def doomed() -> Iterator[Pool]:
    """Samplers of which one will end."""
    found = Pool("gloo", SECONDS, [None, None])
    yield found
    found.close()


def test_weights_arrive_bit_for_bit_and_the_default_group_is_left_alone(pool: Pool, tmp_path: Path) -> None:
    """That of a trainer of one rank, made before; the samplers have none."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        before = dist.group.WORLD
        asyncio.run(pool.broadcast.meet())
        for version in (next(VERSIONS), next(VERSIONS)):
            model = changed(version)
            asyncio.run(pool.send_weights(version, model))
            assert asyncio.run(pool.all("weights")) == [bytes_of(model)] * 2
            expected = asyncio.run(NativeEngine(model).generate(PROMPT, GREEDY))
            for answer in asyncio.run(pool.all("say", prompt=PROMPT)):
                assert (answer["ids"], set(answer["versions"])) == (list(expected.ids), {version})
        assert dist.group.WORLD is before
        assert dist.get_world_size() == 1
        dist.barrier()
    finally:
        dist.destroy_process_group()


def test_a_damaged_bucket_is_refused_and_the_next_one_taken(pool: Pool) -> None:
    """Altered after its checksum: both refuse it, and the group goes on."""
    model = changed(3)

    async def send_corrupted() -> None:
        await pool.broadcast.meet()
        await pool.announced(next(VERSIONS))
        bucket = next(parts_of(model))
        for one in pool.send_corrupted(bucket, plain_bytes(bucket).clone()):
            with pytest.raises(ValueError, match="came damaged"):
                one.result(10)
        await pool.all("abort")
        await pool.send_weights(next(VERSIONS), model)

    asyncio.run(send_corrupted())
    assert not pool.broadcast.broken


def test_what_a_sampler_refuses_is_raised_once_all_have_it(pool: Pool) -> None:
    async def refused() -> None:
        await pool.broadcast.meet()
        await pool.announced(next(VERSIONS))
        with pytest.raises(ValueError, match="unknown weight 'large'"):
            await pool.broadcast.send(large(1 << 10))
        await pool.all("abort")
        await pool.send_weights(next(VERSIONS), changed(4))

    asyncio.run(refused())


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "hanging"])
def test_a_sampler_that_ends_or_hangs_in_mid_broadcast_is_an_error_in_bounded_time(doomed: Pool, killed: bool) -> None:
    """It stops reading while the bytes pass; then it is killed, or nothing more is heard of it."""

    async def broken() -> float:
        await doomed.broadcast.meet()
        await doomed.announced(next(VERSIONS))
        sent = await doomed.stopped(large(LARGE), 0.5)
        if killed:
            doomed.send_signal(signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(WorkerDied, match="process ended" if killed else "take a bucket of weights"):
            await sent
        return time.monotonic() - begun

    took = asyncio.run(broken())
    assert took < (SECONDS if killed else SECONDS + 2 * SLACK + 1)
    assert doomed.broadcast.broken
    if not killed:
        doomed.send_signal(signal.SIGKILL)


def test_a_sampler_that_does_not_come_is_an_error_in_bounded_time(doomed: Pool) -> None:
    doomed.send_signal(signal.SIGSTOP, 0)
    begun = time.monotonic()
    with pytest.raises(WorkerDied, match="did not all meet"):
        asyncio.run(doomed.broadcast.meet())
    assert time.monotonic() - begun < SECONDS + 2 * SLACK + 1
    doomed.send_signal(signal.SIGKILL, 0)


def test_all_of_it_listens_on_loopback_alone(pool: Pool) -> None:
    asyncio.run(pool.broadcast.meet())
    assert set[str]().union(*listen_addresses(psutil.Process()).values()) == {"127.0.0.1"}


def sending(there: "Connection[Any, Any]", sends: int, hangs: bool) -> None:
    """A sender: so many bytes of 1, and then it ends or does nothing."""
    meeting = RendezvousStore("gloo", 1, seconds=SECONDS)
    there.send(meeting.rendezvous.message())
    group = meeting.join()
    for _ in range(sends):
        group.send(torch.ones(1 << 10, dtype=torch.uint8))
    if hangs:
        time.sleep(60)
    os._exit(0)


@pytest.mark.parametrize("hangs", [False, True], ids=["dead", "hanging"])
def test_a_sender_that_ends_or_hangs_is_an_error_in_bounded_time(hangs: bool) -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    sender = context.Process(target=sending, args=(there, 1, hangs), daemon=True)
    sender.start()
    group = join(Rendezvous.read(here.recv()), 1)
    assert group.take(1 << 10).eq(1).all()
    begun = time.monotonic()
    with pytest.raises(BrokenGroup, match="a broadcast of weights failed"):
        group.take(1 << 10)
    assert time.monotonic() - begun < SECONDS + 1
    sender.kill()
    sender.join()


def test_nobody_at_the_place_of_the_sender_is_an_error_in_bounded_time() -> None:
    with pytest.raises(BrokenGroup, match="no sender of weights at 127"):
        join(Rendezvous("gloo", "127.0.0.1", 9, 2, "token", seconds=1.0), 1)


def two_ends(token: str | None = None) -> list[Any]:
    """Both ends of a group in this process, or what each of them raised; `token`: that the sampler expects."""
    meeting = RendezvousStore("gloo", 1, seconds=SECONDS)
    plain = meeting.rendezvous.message()
    mine = waited(meeting.join, "mine")
    theirs = waited(lambda: join(Rendezvous.read(plain | ({"token": token} if token else {})), 1), "theirs")
    return [found.exception(20) or found.result() for found in (mine, theirs)]


def test_who_was_invited_elsewhere_does_not_meet() -> None:
    assert {type(end) for end in two_ends("another")} == {BrokenGroup}


def test_an_abort_ends_what_waits_and_nothing_passes_after_it() -> None:
    mine, theirs = two_ends()
    threading.Timer(0.3, theirs.abort).start()
    begun = time.monotonic()
    with pytest.raises(BrokenGroup):
        theirs.take(8)
    assert time.monotonic() - begun < SECONDS + 1
    with pytest.raises(BrokenGroup, match="was ended"):
        theirs.take(8)
    mine.abort()


def test_no_bytes_need_no_broadcast() -> None:
    mine, theirs = two_ends()
    mine.send(torch.empty(0, dtype=torch.uint8))
    assert not theirs.take(0).numel()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"backend": "hccl"}, "backend must be one of gloo, nccl, got 'hccl'"),
        ({"size": 1}, "at least one sampler"),
        ({"seconds": 0.0}, "seconds must be above 0"),
    ],
)
def test_what_an_invitation_can_not_say(changes: dict[str, Any], problem: str) -> None:
    plain = {"backend": "gloo", "host": "127.0.0.1", "port": 1, "size": 2, "token": "", "seconds": 1.0}
    with pytest.raises(ValueError, match=problem):
        Rendezvous.read(plain | changes)


def test_nccl_without_a_cuda_device_is_refused() -> None:
    meeting = RendezvousStore("nccl", 1, seconds=SECONDS)
    with pytest.raises(ValueError, match="between CUDA devices"):
        meeting.join(torch.device("cpu"))
