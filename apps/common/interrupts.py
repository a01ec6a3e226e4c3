"""Ctrl-C that is not lost.

A KeyboardInterrupt can be swallowed where Python ignores errors (finalizers, callbacks), and asyncio turns it into a
cancellation, which a task that is just ending outlives. So it is noted, and loops ask.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_pressed = False  # since the outermost `noted` began


@contextmanager
def noted() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGINT, and note it for `check`; only the main thread may handle signals."""
    global _pressed
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _pressed = False
    before = signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def check() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed within `noted` and got lost."""
    if _pressed:
        raise KeyboardInterrupt


def _note(signal_number: int, frame: FrameType | None) -> None:
    global _pressed
    del signal_number, frame
    _pressed = True
    raise KeyboardInterrupt
