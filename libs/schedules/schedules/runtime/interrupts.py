"""Ctrl-C that is not lost, and breaks nothing.

1. A KeyboardInterrupt can be swallowed where Python ignores errors (finalizers, callbacks), and asyncio turns it into a
   cancellation, which a task that is just ending outlives. So it is noted, and loops ask (`check`).
2. One that is raised between two steps of a lock's owner leaves the lock held for ever: `Condition.__enter__` acquires
   in C and returns to Python, and so do queues, futures of executors and the start of a thread. So where this thread
   shares locks with others it is only noted (`defer_interrupts`), and raised when that part is over.
3. An event loop is such a part, and can be long: `Runner` cancels what runs in it at once.

A second press is raised at once, wherever it comes.
"""

import asyncio
import functools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
_presses = 0  # within the outermost `handle_interrupts`
_holds = 0
_on_press: list[Callable[[], object]] = []
_terminations: list[int] | None = None  # within the outermost `note_termination`


@contextmanager
def handle_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGINT, and note it for `check`; only the main thread may handle signals."""
    global _presses
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    outermost = signal.getsignal(signal.SIGINT) is not _note
    if outermost:
        _presses = 0
    before = signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if outermost:
            _presses = 0


def interrupted() -> bool:
    """Return whether Ctrl-C was pressed within `handle_interrupts`."""
    return _presses > 0


def check() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed within `handle_interrupts` and got lost, or came within
    `defer_interrupts`."""
    if _presses and not _holds:
        raise KeyboardInterrupt


@contextmanager
def note_termination() -> Iterator[Callable[[], bool]]:
    """Note SIGTERM, which clusters send some seconds before they kill; yield what says whether it came.

    A second one ends the process at once. Ranks that another process started leave it to that one. In a block
    within another one, that one notes.
    """
    global _terminations
    if _terminations is not None:
        yield functools.partial(bool, _terminations)
        return
    if threading.current_thread() is not threading.main_thread() or multiprocessing.parent_process() is not None:
        yield lambda: False
        return
    came = _terminations = list[int]()

    def note(number: int, frame: FrameType | None) -> None:
        del frame
        came.append(number)
        signal.signal(number, before)
        os.write(2, b"SIGTERM: the run ends after this step, with a checkpoint; another one ends it at once\n")

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, before)
        _terminations = None


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Let Ctrl-C wait until the block is over; a second press does not wait. Blocks can be nested."""
    global _holds
    _holds += 1
    try:
        yield
    finally:
        _holds -= 1
        check()


class Runner:
    """An `asyncio.Runner` in which Ctrl-C cancels what runs, and is raised once that has ended; a context manager."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def __enter__(self) -> "Runner":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Cancel what is left and wait for the loop's threads."""
        with defer_interrupts():
            self._runner.close()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end, or to Ctrl-C."""
        with defer_interrupts():
            return self._runner.run(_cancellable(main))


async def _cancellable(main: Coroutine[Any, Any, T]) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        loop.call_soon_threadsafe(task.cancel)

    _on_press.append(cancel)
    try:
        if _presses:
            main.close()
            raise KeyboardInterrupt
        return await main
    finally:
        _on_press.remove(cancel)


def _note(signal_number: int, frame: FrameType | None) -> None:
    global _presses
    del signal_number, frame
    _presses += 1
    for react in _on_press:
        react()
    if not _holds or _presses > 1:
        raise KeyboardInterrupt
