"""Weights from one CUDA device to those of other processes through NCCL: bits, damage, a death, a hang, sockets.

The sender is this process, on the first device; one or two samplers are processes that see one further device each, as
Ray shows an actor its own. `python -m pytest libs/rollout/rollout/workers/collective_gpu_test.py`, some two minutes.
"""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from rollout.native.engine import NativeEngine
from rollout.sync.manifest import Manifest
from rollout.sync.pieces import Bucket, Header, buckets
from rollout.testing.model import tiny_model
from rollout.testing.pieces import pieces_of
from rollout.workers.channel import Message
from rollout.workers.collective import waited
from rollout.workers.collective_pool import SLACK, PoolBroadcast
from rollout.workers.collective_taken import MARK
from rollout.workers.process import WorkerDied, WorkerProcess
from rollout.workers.serve import serve, weight_handlers
from rollout.workers.weights import bucket_message, manifest_message

pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices: a sender's and a sampler's"),
]
VISIBLE = "CUDA_VISIBLE_DEVICES"
SECONDS = 10.0
STARTING = 60.0
"""Seconds for a group to be made: NCCL looks at the machine first."""
LARGE = 1 << 28
VERSIONS = itertools.count(1)


def sampling(connection: "Connection[Any, Any]") -> None:
    """The process: an engine on the one device that it sees."""
    model = tiny_model(24, layers=2, seed=0).cuda()
    engine = NativeEngine(model)

    async def weights(call: dict[str, Any]) -> bytes:
        """All parameters, end to end."""
        del call
        return whole_of(model)

    async def devices(call: dict[str, Any]) -> dict[str, Any]:
        del call
        return {"count": torch.cuda.device_count(), "group": str(engine_device(model))}

    serve(connection, {**weight_handlers(engine), "weights": weights, "devices": devices})


def engine_device(model: Any) -> torch.device:
    return torch.device(next(iter(model.parameters())).device)


def whole_of(model: Any) -> bytes:
    return b"".join(p.detach().cpu().numpy().tobytes() for _, p in model.named_parameters())


def visible() -> list[str]:
    said = os.environ.get(VISIBLE)
    return said.split(",") if said else [str(i) for i in range(torch.cuda.device_count())]


@contextmanager
def seeing(device: str) -> Iterator[None]:
    """Processes that are started inside see this device alone; this one has looked already."""
    torch.cuda.init()
    before = os.environ.get(VISIBLE)
    os.environ[VISIBLE] = device
    try:
        yield
    finally:
        if before is None:
            del os.environ[VISIBLE]
        else:
            os.environ[VISIBLE] = before


class Pool:
    """One or two samplers behind a broadcast, as a Ray pool has them."""

    def __init__(self) -> None:
        self.workers: list[WorkerProcess] = []
        for device in visible()[1:3]:
            with seeing(device):
                self.workers.append(WorkerProcess(sampling, ()))
        for worker in self.workers:
            worker.ready.result(120)
        self.broadcast = self.another()

    def another(self, seconds: float = STARTING) -> PoolBroadcast:
        self.broadcast = PoolBroadcast("nccl", self.ask, len(self.workers), seconds)
        return self.broadcast

    def ask(self, index: int, name: str, arguments: Mapping[str, Any]) -> "Future[Message]":
        return self.workers[index].call(name, **arguments)

    async def all(self, name: str, **arguments: Any) -> list[Any]:
        asked = [asyncio.wrap_future(worker.call(name, **arguments)) for worker in self.workers]
        return [payload or head.get("answer") for head, payload in await asyncio.gather(*asked)]

    async def handed_over(self, version: int, model: Any) -> None:
        await self.all("prepare", **manifest_message(Manifest(version)))
        missing = 1
        for bucket in buckets(pieces_of(model.named_parameters()), 1 << 14):
            assert bucket.buffer.device.type == "cuda"
            missing = await self.broadcast.send(bucket)
        assert missing == 0
        await self.all("pause", mode="finish")
        await self.all("commit", version=version)
        await self.all("resume")

    def close(self) -> None:
        self.broadcast.close()
        for worker in self.workers:
            worker.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[Pool]:
    torch.cuda.set_device(0)
    found = Pool()
    yield found
    found.close()


@pytest.fixture
def pool(processes: Pool) -> Iterator[Pool]:
    """Samplers that live, and join a group of each test's own."""
    processes.another()
    yield processes
    processes.broadcast.close()


@pytest.fixture
def doomed() -> Iterator[Pool]:
    """Samplers of which one will end."""
    torch.cuda.set_device(0)
    found = Pool()
    yield found
    found.close()


def changed(seed: int) -> Any:
    return tiny_model(24, layers=2, seed=seed).to("cuda:0")


def test_all_of_it_listens_on_loopback_alone(pool: Pool) -> None:
    """NCCL's sockets too. It looks for an interface once in a process's life: this test is the first one here."""
    asyncio.run(pool.broadcast.meet())
    me = psutil.Process()
    found = {
        one.laddr.ip.removeprefix("::ffff:")
        for process in (me, *me.children(recursive=True))
        for one in process.net_connections("inet")
        if one.status == psutil.CONN_LISTEN
    }
    assert found <= {"127.0.0.1", "::1"}, found


def test_weights_arrive_bit_for_bit_beside_a_default_group_of_nccl(pool: Pool) -> None:
    """The trainer's own group works before, meanwhile and after."""
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        before, ones = dist.group.WORLD, torch.ones(4, device="cuda:0")
        dist.all_reduce(ones)
        asyncio.run(pool.broadcast.meet())
        for version in (next(VERSIONS), next(VERSIONS)):
            model = changed(version)
            asyncio.run(pool.handed_over(version, model))
            assert asyncio.run(pool.all("weights")) == [whole_of(model)] * len(pool.workers)
            dist.all_reduce(ones)
        assert dist.group.WORLD is before
        assert ones.eq(1).all()
        told = asyncio.run(pool.all("devices"))
        assert told == [{"count": 1, "group": "cuda:0"}] * len(pool.workers)
    finally:
        dist.destroy_process_group()


def test_a_damaged_bucket_is_refused_and_the_next_one_taken(pool: Pool) -> None:
    """Altered after its digest, on the device: all refuse it, and the group goes on."""
    model = changed(3)

    async def damaged() -> None:
        await pool.broadcast.meet()
        await pool.all("prepare", **manifest_message(Manifest(next(VERSIONS))))
        bucket = next(buckets(pieces_of(model.named_parameters()), 1 << 14))
        data = bucket.buffer.clone()
        head = {**bucket_message(bucket, data), MARK: True}
        assert "digest" in head
        data[7] ^= 1
        torch.cuda.synchronize()
        group = pool.broadcast._group
        assert group is not None
        sent = waited(lambda: group.send(data), "send")
        asked = [worker.call("receive", **head) for worker in pool.workers]
        sent.result(30)
        for one in asked:
            with pytest.raises(ValueError, match="came damaged"):
                one.result(30)
        await pool.all("abort")
        await pool.handed_over(next(VERSIONS), model)

    asyncio.run(damaged())
    assert asyncio.run(pool.all("weights")) == [whole_of(model)] * len(pool.workers)
    assert not pool.broadcast.broken


def large() -> Bucket:
    """More than NCCL's buffers hold: who does not take it holds its sender up."""
    header = Header("large", (LARGE,), torch.uint8, 0, LARGE, 0)
    return Bucket((header,), torch.ones(LARGE, dtype=torch.uint8, device="cuda:0"))


@pytest.mark.parametrize("killed", [True, False], ids=["killed", "hanging"])
def test_a_sampler_that_ends_or_hangs_in_mid_broadcast_is_an_error_in_bounded_time(doomed: Pool, killed: bool) -> None:
    """The sender's device is free again, and other processes make another group with it."""
    pid = doomed.workers[-1].process.pid
    assert pid is not None

    async def broken() -> float:
        await doomed.broadcast.meet()
        doomed.broadcast._seconds = SECONDS
        assert doomed.broadcast._group is not None
        doomed.broadcast._group._seconds = SECONDS
        await doomed.all("prepare", **manifest_message(Manifest(1)))
        os.kill(pid, signal.SIGSTOP)
        sent = asyncio.create_task(doomed.broadcast.send(large()))
        await asyncio.sleep(1.0)
        assert not sent.done()
        if killed:
            os.kill(pid, signal.SIGKILL)
        begun = time.monotonic()
        with pytest.raises(WorkerDied, match="process ended" if killed else "take a bucket of weights"):
            await sent
        return time.monotonic() - begun

    took = asyncio.run(broken())
    assert took < (SECONDS if killed else SECONDS + 2 * SLACK + 1)
    assert doomed.broadcast.broken
    if not killed:
        os.kill(pid, signal.SIGKILL)
    waited(torch.cuda.synchronize, "sync").result(30)
    assert torch.ones(8, device="cuda:0").sum().item() == 8
    if not killed:
        return
    again = Pool()
    try:
        asyncio.run(again.broadcast.meet())
        model = changed(5)
        asyncio.run(again.handed_over(1, model))
        assert asyncio.run(again.all("weights")) == [whole_of(model)] * len(again.workers)
    finally:
        again.close()
