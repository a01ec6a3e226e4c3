"""A sampling process: calls beside one another, weights through shared memory, deaths and orphans."""

import asyncio
import multiprocessing
import multiprocessing.context
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Never

import pytest
import torch
from transformers import PreTrainedModel

from rollout.engine import Sampling
from rollout.errors import NotFiniteError
from rollout.native.engine import NativeEngine
from rollout.sync.manifest import Manifest, TensorSpec, manifest_of
from rollout.sync.pieces import Bucket, buckets
from rollout.sync.transfer import transfer_weights
from rollout.testing.model import tiny_model
from rollout.testing.pieces import pieces_of
from rollout.workers.bucket_messages import SharedBuckets, TakenBuckets, manifest_from, manifest_message
from rollout.workers.process import WorkerDied, WorkerProcess
from rollout.workers.serve import serve, weight_handlers

VOCAB, PROMPT = 24, [3, 5, 7]
GREEDY = Sampling(greedy=True, max_new_tokens=8)


@pytest.fixture
def spawned() -> Iterator[None]:
    """Spawn as a user's run does; other tests start processes as pytest_main.py has them, faster."""
    with pytest.MonkeyPatch.context() as patch:
        contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
        patch.setitem(contexts, "spawn", multiprocessing.context.SpawnContext())
        yield


def small(seed: int) -> PreTrainedModel:
    return tiny_model(VOCAB, layers=2, seed=seed)


def sampling(connection: "Connection[Any, Any]") -> None:
    """The process: an engine that says what it samples."""
    torch.set_num_threads(1)
    engine = NativeEngine(small(0))

    async def say(call: dict[str, Any]) -> dict[str, Any]:
        done = await engine.generate(call["prompt"], GREEDY)
        return {"ids": list(done.ids), "versions": list(done.policy_versions)}

    async def echo(call: dict[str, Any]) -> bytes:
        await asyncio.sleep(call["seconds"])
        text: str = call["text"]
        return text.encode()

    async def fail(call: dict[str, Any]) -> Never:
        raise {"ValueError": ValueError, "NotFinite": NotFiniteError, "KeyError": KeyError}[call["kind"]]("no")

    serve(connection, {**weight_handlers(engine), "say": say, "echo": echo, "fail": fail})


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    worker = WorkerProcess(sampling, ())
    worker.ready.result(120)
    yield worker
    worker.close()


def said(worker: WorkerProcess) -> dict[str, Any]:
    answer: dict[str, Any] = worker.call("say", prompt=PROMPT).result(60)[0]["answer"]
    return answer


def test_calls_do_not_wait_for_one_another(worker: WorkerProcess) -> None:
    slow = worker.call("echo", text="slow", seconds=1.5)
    assert worker.call("echo", text="fäst", seconds=0).result(60)[1].decode() == "fäst"
    assert not slow.done()
    assert slow.result(60)[1] == b"slow"


def test_errors_come_back_as_what_they_are(worker: WorkerProcess) -> None:
    for kind, error in (("ValueError", ValueError), ("NotFinite", NotFiniteError), ("KeyError", RuntimeError)):
        with pytest.raises(error, match="no"):
            worker.call("fail", kind=kind).result(60)


def test_an_answer_that_nobody_waits_for_any_more_disturbs_nobody(worker: WorkerProcess) -> None:
    """As after a time limit: the answer comes late, or not at all, to a future that was cancelled."""
    for late in (worker.call("echo", text="late", seconds=0.3), worker.call("fail", kind="ValueError")):
        late.cancel()
    assert worker.call("echo", text="next", seconds=0.6).result(60)[1] == b"next"
    assert worker.alive
    assert said(worker)["versions"] == [0] * 8


def test_weights_come_through_shared_memory_whole_or_not_at_all(worker: WorkerProcess) -> None:
    def weights(seed: int) -> tuple[Manifest, list[Bucket]]:
        named = list(small(seed).named_parameters())
        return manifest_of(seed, pieces_of(named)), list(buckets(pieces_of(named), 20_000))

    def expected(seed: int) -> list[int]:
        return list(NativeEngine(small(seed)).generate_batch([PROMPT], GREEDY)[0].ids)

    assert said(worker) == {"ids": expected(0), "versions": [0] * 8}
    asyncio.run(transfer_weights([worker], *weights(1)))
    assert said(worker) == {"ids": expected(1), "versions": [1] * 8}
    manifest, sent = weights(2)
    sent[-1] = Bucket(sent[-1].headers, sent[-1].buffer.flip(0))
    with pytest.raises(ValueError, match="the old ones stay"):
        asyncio.run(transfer_weights([worker], manifest, sent))
    assert said(worker)["ids"] == expected(1)


def test_a_bucket_that_is_damaged_on_the_way_is_refused() -> None:
    sender, taker = SharedBuckets(), TakenBuckets()
    bucket = next(buckets(pieces_of([("a", torch.arange(6.0).bfloat16()), ("b", torch.ones(3, 2))]), 1 << 20))
    message = sender.put(bucket)
    found = taker.take(message)
    assert found.headers == bucket.headers
    assert torch.equal(found.buffer, bucket.buffer)
    assert sender._segment is not None
    assert sender._segment.buf is not None
    sender._segment.buf[3] ^= 1
    with pytest.raises(ValueError, match="came damaged"):
        taker.take(message)
    taker.close()
    sender.close()
    manifest = manifest_of(3, pieces_of([("a", torch.ones(2, 3))]))
    assert manifest_from(manifest_message(manifest)) == manifest
    with pytest.raises(ValueError, match="complex64 have no name"):
        manifest_message(Manifest(3, (TensorSpec("a", (2,), torch.complex64),)))


def test_who_waits_for_a_process_that_dies_hears_of_it() -> None:
    worker = WorkerProcess(sampling, ())
    worker.ready.result(120)
    left = worker.call("echo", text="nobody's", seconds=3600)
    waiting = worker.call("echo", text="never", seconds=3600)
    left.cancel()
    assert worker.process.pid is not None
    os.kill(worker.process.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied):
        waiting.result(60)
    assert not worker.alive
    with pytest.raises(WorkerDied):
        worker.call("echo", text="later", seconds=0).result(1)
    worker.close()


def run_alone(connection: "Connection[Any, Any]") -> None:
    """A run that starts a sampling process and is then killed."""
    worker = WorkerProcess(sampling, ())
    worker.ready.result(120)
    worker.call("echo", text="busy", seconds=3600)
    connection.send(worker.process.pid)
    time.sleep(3600)


def runs(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.usefixtures("spawned")
def test_a_process_whose_run_is_killed_ends_too() -> None:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    run = context.Process(target=run_alone, args=(theirs,))
    run.start()
    assert mine.poll(120)
    orphan = mine.recv()
    assert runs(orphan)
    run.kill()
    run.join()
    deadline = time.monotonic() + 60
    while runs(orphan) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not runs(orphan)


def test_a_stopped_process_is_told_and_killed(capfd: pytest.CaptureFixture[str]) -> None:
    worker = WorkerProcess(sampling, (), stall_seconds=2.0)
    try:
        worker.ready.result(60)
        assert worker.process.pid is not None
        time.sleep(3.0)  # longer than it may say nothing: it beats
        assert worker.alive
        os.kill(worker.process.pid, signal.SIGSTOP)
        with pytest.raises(WorkerDied):
            worker.call("echo", text="x", seconds=0).result(60)
        assert "said nothing for 2 s" in str(worker.why)
        assert "said nothing for 2 s and is replaced" in capfd.readouterr().err
    finally:
        worker.close()
