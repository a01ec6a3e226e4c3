"""A lock that is passed on in the order of requests."""

import threading
from collections import deque
from types import TracebackType


class FairLock:
    """A lock as `threading.Lock` in a with statement, first come first served.

    A thread that releases it and acquires it again at once, as a decode loop does, comes after those that were waiting.
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._held = False
        self._queue: deque[threading.Event] = deque()

    def __enter__(self) -> None:
        turn = threading.Event()
        with self._mutex:
            if not self._held:
                self._held = True
                return
            self._queue.append(turn)
        done = False
        try:
            turn.wait()
            done = True
        finally:
            if not done:
                self._give_up(turn)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._mutex:
            self._pass_on()

    def _pass_on(self) -> None:
        if self._queue:
            self._queue.popleft().set()
        else:
            self._held = False

    def _give_up(self, turn: threading.Event) -> None:
        """Leave the queue after an exception (Ctrl-C) while waiting, or pass on a turn that came at that moment."""
        with self._mutex:
            if turn in self._queue:
                self._queue.remove(turn)
            else:
                self._pass_on()
