"""Weights from one CUDA device to those of other processes through NCCL: bits, damage, a death, a hang, sockets.

The sender is this process, on the first device; one or two samplers are processes that see one further device each, as
Ray shows an actor its own. `python -m pytest libs/rollout/rollout/workers/collective_gpu_test.py`, some two minutes.
"""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
import torch.distributed as dist

from rollout.testing.broadcasts import VISIBLE, Pool, bytes_of, changed, large, parts_of
from rollout.testing.listen_addresses import listen_addresses
from rollout.workers.bucket_messages import bucket_message
from rollout.workers.collective import waited
from rollout.workers.collective_pool import SLACK
from rollout.workers.process import WorkerDied

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices: a sender's and a sampler's"),
]
SECONDS = 10.0
STARTING = 60.0
"""Seconds for a group to be made: NCCL looks at the machine first."""
LARGE = 1 << 28
"""Bytes, more than NCCL's buffers hold."""
DEVICE = "cuda:0"
VERSIONS = itertools.count(1)


def visible() -> list[str]:
    said = os.environ.get(VISIBLE)
    return said.split(",") if said else [str(i) for i in range(torch.cuda.device_count())]


def started() -> Pool:
    """Samplers on the one or two devices after the first one."""
    torch.cuda.set_device(0)
    return Pool("nccl", STARTING, visible()[1:3])


@pytest.fixture(scope="module")
def processes() -> Iterator[Pool]:
    found = started()
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
    found = started()
    yield found
    found.close()


def test_all_of_it_listens_on_loopback_alone(pool: Pool) -> None:
    """NCCL's sockets too. It looks for an interface once in a process's life: this test is the first one here."""
    asyncio.run(pool.broadcast.meet())
    found = listen_addresses(psutil.Process())
    assert set[str]().union(*found.values()) <= {"127.0.0.1", "::1"}, found


def test_weights_arrive_bit_for_bit_beside_a_default_group_of_nccl(pool: Pool) -> None:
    """The trainer's own group works before, meanwhile and after."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before, ones = dist.group.WORLD, torch.ones(4, device=DEVICE)
        dist.all_reduce(ones)
        asyncio.run(pool.broadcast.meet())
        for version in (next(VERSIONS), next(VERSIONS)):
            model = changed(version, DEVICE)
            assert next(parts_of(model)).buffer.device.type == "cuda"
            asyncio.run(pool.send_weights(version, model))
            assert asyncio.run(pool.all("weights")) == [bytes_of(model)] * len(pool.workers)
            dist.all_reduce(ones)
        assert dist.group.WORLD is before
        assert ones.eq(1).all()
        told = asyncio.run(pool.all("devices"))
        assert told == [{"count": 1, "model": DEVICE}] * len(pool.workers)
    finally:
        dist.destroy_process_group()


def test_a_damaged_bucket_is_refused_and_the_next_one_taken(pool: Pool) -> None:
    """Altered after its digest, on the device: all refuse it, and the group goes on."""
    model = changed(3, DEVICE)

    async def send_corrupted() -> None:
        await pool.broadcast.meet()
        await pool.announced(next(VERSIONS))
        bucket = next(parts_of(model))
        data = bucket.buffer.clone()
        assert "digest" in bucket_message(bucket, data)
        for one in pool.send_corrupted(bucket, data):
            with pytest.raises(ValueError, match="came damaged"):
                one.result(30)
        await pool.all("abort")
        await pool.send_weights(next(VERSIONS), model)

    asyncio.run(send_corrupted())
    assert asyncio.run(pool.all("weights")) == [bytes_of(model)] * len(pool.workers)
    assert not pool.broadcast.broken


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "hanging"])
def test_a_sampler_that_ends_or_hangs_in_mid_broadcast_is_an_error_in_bounded_time(doomed: Pool, killed: bool) -> None:
    """The sender's device is free again, and other processes make another group with it."""

    async def broken() -> float:
        await doomed.broadcast.meet()
        doomed.broadcast._seconds = SECONDS
        assert doomed.broadcast._group is not None
        doomed.broadcast._group.seconds = SECONDS
        await doomed.announced(1)
        sent = await doomed.stopped(large(LARGE, DEVICE), 1.0)
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
    waited(torch.cuda.synchronize, "sync").result(30)
    assert torch.ones(8, device=DEVICE).sum().item() == 8
    if not killed:
        return
    again = started()
    try:
        asyncio.run(again.broadcast.meet())
        model = changed(5, DEVICE)
        asyncio.run(again.send_weights(1, model))
        assert asyncio.run(again.all("weights")) == [bytes_of(model)] * len(again.workers)
    finally:
        again.close()
