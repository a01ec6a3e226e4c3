"""A coroutine on an event loop of its own, in a thread: for sampling beside training."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class RolloutThread(Generic[T]):
    """Thread that runs one coroutine to its end; `seconds` are its begin and end (`time.perf_counter`)."""

    def __init__(self, job: Coroutine[Any, Any, T]) -> None:
        self._result: T | None = None
        self._error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(job)
        self._thread = threading.Thread(target=self._run, name="sampling", daemon=True)
        self.seconds = (0.0, 0.0)
        self._thread.start()

    def result(self) -> T:
        """Wait for its result; what it raised is raised here."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def cancel(self) -> None:
        """End it, and wait until it has ended."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        begun = time.perf_counter()
        try:
            self._loop.run_until_complete(asyncio.wait([self._task]))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()
        self.seconds = (begun, time.perf_counter())
        if self._task.cancelled():
            self._error = asyncio.CancelledError()
        elif (error := self._task.exception()) is not None:
            self._error = error
        else:
            self._result = self._task.result()
