"""For tests of weight sync through a process group: samplers in processes of their own behind a pool's broadcast."""

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from rollout.engine import Sampling
from rollout.native.engine import NativeEngine
from rollout.sync.manifest import Manifest
from rollout.sync.pieces import Bucket, Header, buckets
from rollout.testing.model import tiny_model
from rollout.testing.pieces import pieces_of
from rollout.workers.broadcast_receiver import MARK
from rollout.workers.bucket_messages import bucket_message, manifest_message
from rollout.workers.channel import Message
from rollout.workers.collective import Backend, waited
from rollout.workers.collective_pool import PoolBroadcast
from rollout.workers.process import WorkerProcess
from rollout.workers.serve import serve, weight_handlers

PROMPT = [3, 5, 7]
GREEDY = Sampling(greedy=True, max_new_tokens=8)
VISIBLE = "CUDA_VISIBLE_DEVICES"


def changed(seed: int, device: str = "cpu") -> Any:
    """Return a model of the samplers' kind, from another seed than theirs (0)."""
    return tiny_model(24, layers=2, seed=seed).to(device)


def bytes_of(model: Any) -> bytes:
    """Return the bytes of all parameters, end to end."""
    return b"".join(p.detach().cpu().numpy().tobytes() for _, p in model.named_parameters())


def sampling(connection: "Connection[Any, Any]", device: str) -> None:
    """Run an engine in a process; calls ask for its completions, its weights and the devices that it sees."""
    torch.set_num_threads(1)
    model = changed(0, device)
    engine = NativeEngine(model)

    async def say(call: dict[str, Any]) -> dict[str, Any]:
        done = await engine.generate(call["prompt"], GREEDY)
        return {"ids": list(done.ids), "versions": list(done.policy_versions)}

    async def weights(call: dict[str, Any]) -> bytes:
        del call
        return bytes_of(model)

    async def devices(call: dict[str, Any]) -> dict[str, Any]:
        del call
        return {"count": torch.cuda.device_count(), "model": str(next(iter(model.parameters())).device)}

    serve(connection, {**weight_handlers(engine), "say": say, "weights": weights, "devices": devices})


@contextmanager
def vision_devices(device: str) -> Iterator[None]:
    """Let processes that are started inside see this CUDA device alone; this process has chosen its own already."""
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
    """Samplers behind a broadcast, as in a Ray pool.

    `devices`: the CUDA device that each of them sees alone, None for one on the CPU.
    """

    def __init__(self, backend: Backend, seconds: float, devices: Sequence[str | None]) -> None:
        self.workers: list[WorkerProcess] = []
        for device in devices:
            with nullcontext() if device is None else vision_devices(device):
                self.workers.append(WorkerProcess(sampling, ("cpu" if device is None else "cuda",)))
        self._group = (backend, self.ask, len(devices), seconds)
        self.broadcast = PoolBroadcast(*self._group)
        for worker in self.workers:
            worker.ready.result(120)

    def new_group(self) -> None:
        """Make another group, which no sampler has joined yet."""
        self.broadcast = PoolBroadcast(*self._group)

    def ask(self, index: int, name: str, arguments: Mapping[str, Any]) -> "Future[Message]":
        """Call one of the samplers."""
        return self.workers[index].call(name, **arguments)

    async def all(self, name: str, **arguments: Any) -> list[Any]:
        """Call all samplers and return their results."""
        calls = [asyncio.wrap_future(worker.call(name, **arguments)) for worker in self.workers]
        return [payload or head.get("answer") for head, payload in await asyncio.gather(*calls)]

    async def announced(self, version: int) -> None:
        """Notify all samplers that weights come."""
        await self.all("prepare", **manifest_message(Manifest(version)))

    async def send_weights(self, version: int, model: Any) -> None:
        """Send a model's weights to all samplers."""
        await self.announced(version)
        missing = 1
        for bucket in parts_of(model):
            missing = await self.broadcast.send(bucket)
        assert missing == 0
        await self.all("pause", mode="finish")
        await self.all("commit", version=version)
        await self.all("resume")

    def send_corrupted(self, bucket: Bucket, data: Tensor) -> "list[Future[Message]]":
        """Send the bucket's bytes `data`, altered after their checksum; return the results of all."""
        head = {**bucket_message(bucket, data), MARK: True}
        data[7] ^= 1
        if data.is_cuda:
            torch.cuda.synchronize()
        group = self.broadcast._group
        assert group is not None
        sent = waited(lambda: group.send(data), "send")
        calls = [worker.call("receive", **head) for worker in self.workers]
        sent.result(30)
        return calls

    async def stopped(self, bucket: Bucket, seconds: float) -> "asyncio.Task[int]":
        """Stop the last sampler and send a bucket; return the send, which still runs after that many seconds."""
        self.send_signal(signal.SIGSTOP)
        sent = asyncio.create_task(self.broadcast.send(bucket))
        await asyncio.sleep(seconds)
        assert not sent.done()
        return sent

    def send_signal(self, sign: signal.Signals, index: int = -1) -> None:
        """Send a signal to the process of a sampler, by default the last one."""
        pid = self.workers[index].process.pid
        assert pid is not None
        os.kill(pid, sign)

    def close(self) -> None:
        """End the broadcast and all samplers."""
        self.broadcast.close()
        for worker in self.workers:
            worker.close()


def parts_of(model: Any) -> Iterator[Bucket]:
    """Return a model's weights in several buckets."""
    return buckets(pieces_of(model.named_parameters()), 1 << 14)


def large(nbytes: int, device: str = "cpu") -> Bucket:
    """Return a bucket of bytes of 1. Where it exceeds the buffers on the way, a receiver that does not read blocks its
    sender."""
    header = Header("large", (nbytes,), torch.uint8, 0, nbytes, 0)
    return Bucket((header,), torch.ones(nbytes, dtype=torch.uint8, device=device))
