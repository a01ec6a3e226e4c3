"""The run's side of a sampling process: start it, call it, sync its weights, notice its death."""

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from rollout.sync.manifest import Manifest
from rollout.sync.pieces import Bucket
from rollout.workers.bucket_messages import SharedBuckets, manifest_message
from rollout.workers.channel import Channel, Message
from rollout.workers.heartbeat import HEARTBEAT, ask_stack
from rollout.workers.serve import settle_answer, settle_error


class WorkerDied(RuntimeError):  # noqa: N818  what happened, in the words of a log
    """The sampling process ended before it answered."""


class WorkerProcess:
    """A process that runs `target(connection, *args)`, which ends in `rollout.workers.serve.serve`.

    One that is ready and then says nothing for `stall_seconds` (stopped, or stuck in code that holds the interpreter's
    lock) is told, with its stack, and killed. It is spawned, with a pipe that no other process can open. It ends when
    this end closes, also by the death of this process. Any thread may `call`; results come in any order. As a
    `Receiver` it takes weights (`rollout.sync.transfer_weights`).
    """

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], stall_seconds: float = 120.0) -> None:
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()
        self._channel = Channel(mine)
        self._shared = SharedBuckets()
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Message]] = {}
        self._next = 0
        self._dead = False
        self._stall_seconds = stall_seconds
        self.through_host = True
        self.why: BaseException | None = None
        self.ready: Future[Message] = Future()
        self._waiting[-1] = self.ready
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def alive(self) -> bool:
        """Whether the process can still be called."""
        return not self._dead

    def call(self, name: str, **arguments: Any) -> "Future[Message]":
        """Send a call. The future gets the result's head and payload, what was raised there, or WorkerDied."""
        future: Future[Message] = Future()
        with self._lock:
            if self._dead:
                future.set_exception(WorkerDied(f"the sampling process ended before {name}"))
                return future
            self._next += 1
            number = self._next
            self._waiting[number] = future
        try:
            self._channel.send({**arguments, "id": number, "call": name})
        except OSError:
            self._mark_dead()
        return future

    def call_all(self, name: str, **arguments: Any) -> "list[Future[Message]]":
        """Send a call to the one process that there is."""
        return [self.call(name, **arguments)]

    async def ask(self, name: str, **arguments: Any) -> Any:
        """Send a call and wait for its result, on an event loop."""
        head, _ = await asyncio.wrap_future(self.call(name, **arguments))
        return head.get("answer")

    async def prepare(self, manifest: Manifest) -> None:
        """Begin a weight sync."""
        await self.ask("prepare", **manifest_message(manifest))

    async def receive(self, bucket: Bucket) -> int:
        """Copy a bucket into shared memory and stage it."""
        return int((await self.ask("receive", **self._shared.put(bucket)))["missing"])

    async def commit(self, version: int) -> None:
        """Swap the staged weights in."""
        await self.ask("commit", version=version)

    async def abort(self) -> None:
        """Drop what is staged, or restore the old weights."""
        await self.ask("abort")

    async def pause(self, mode: Literal["finish", "abort"] = "finish") -> None:
        """Pause sampling."""
        await self.ask("pause", mode=mode)

    async def resume(self) -> None:
        """Resume sampling."""
        await self.ask("resume")

    def close(self, seconds: float = 10.0) -> None:
        """End the process; what it still samples is lost."""
        self._dead = True
        self.process.terminate()
        self.process.join(seconds)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self._reader.join()
        self._channel.close()
        self._shared.close()

    def _read(self) -> None:
        try:
            heard = time.monotonic()
            while True:
                if not self._channel.poll(HEARTBEAT):
                    silent = self.ready.done() and time.monotonic() - heard > self._stall_seconds
                    if silent and not self._dead and self.process.is_alive():
                        self.why = WorkerDied(f"the sampling process said nothing for {self._stall_seconds:g} s")
                        assert self.process.pid is not None
                        ask_stack(self.process.pid, f"{self.why} and is replaced")
                        self.process.kill()
                    continue
                head, payload = self._channel.receive()
                heard = time.monotonic()
                if "beat" in head:
                    continue
                with self._lock:
                    future = self._waiting.pop(head["id"])
                settle_answer(future, head, payload)
        except (EOFError, OSError):
            self._mark_dead()

    def _mark_dead(self) -> None:
        """Fail all waiting calls: the process is gone."""
        with self._lock:
            self._dead = True
            waiting, self._waiting = self._waiting, {}
        died = WorkerDied(f"the sampling process ended (exit code {self.process.exitcode}) before it answered")
        self.why = self.why or died
        for future in waiting.values():
            settle_error(future, died)
