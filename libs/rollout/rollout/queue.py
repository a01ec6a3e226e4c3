"""Concurrent calls become batches: a queue that one task drains while the calling loop goes on."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic, TypeVar

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class BatchingQueue(Generic[Request, Answer]):
    """Runs `run(requests) -> answers` in a thread, one batch at a time, on all that is waiting (up to `max_batch`).

    Before each batch the loop gets a few turns, so that every coroutine that is about to ask can ask. The queue lives
    with the running event loop and starts anew with the next one; no request may be waiting then.
    """

    SETTLE_TURNS = 3

    def __init__(self, run: Callable[[Sequence[Request]], list[Answer]], max_batch: int) -> None:
        self._run = run
        self._max_batch = max_batch
        self._waiting: deque[tuple[Request, asyncio.Future[Answer]]] = deque()
        self._paused = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._busy = asyncio.Lock()
        self._worker: asyncio.Task[None] | None = None

    async def submit(self, request: Request) -> Answer:
        """The answer to one request; the error of its batch, if that failed."""
        self._enter_loop()
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, future))
        self._wake()
        return await future

    @contextlib.asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """A stretch in which no batch runs; requests wait."""
        self._enter_loop()
        async with self._busy:
            yield

    async def pause(self) -> None:
        """Start no more batches; return when the running one has ended."""
        self._paused = True
        async with self.exclusive():
            pass

    def resume(self) -> None:
        """Go on with what is waiting."""
        self._paused = False
        self._wake()

    def _enter_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop, self._busy, self._worker = loop, asyncio.Lock(), None
            self._waiting.clear()  # their loop is gone, and with it whoever waited

    def _wake(self) -> None:
        if self._waiting and not self._paused and (self._worker is None or self._worker.done()):
            self._worker = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        while self._waiting and not self._paused:
            for _ in range(self.SETTLE_TURNS):
                await asyncio.sleep(0)
            async with self._busy:
                if self._paused:
                    return
                batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._max_batch))]
                await self._answer([b for b in batch if not b[1].done()])

    async def _answer(self, batch: list[tuple[Request, "asyncio.Future[Answer]"]]) -> None:
        if not batch:
            return
        task = asyncio.get_running_loop().run_in_executor(None, self._run, [request for request, _ in batch])
        await asyncio.wait([task])
        error = task.exception()
        for i, (_, future) in enumerate(batch):
            if future.done():
                continue
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(task.result()[i])
