"""Decoding in a thread of its own while there is work."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rollout.errors import ForwardErrors


class DecodeThread:
    """Calls `step()` again and again, in one thread, as long as it says that there is more; sleeps otherwise.

    `post` hands over something to do between two steps; `start` wakes the thread. Neither waits. An exception of a step
    goes to `failed`, in the thread, which then sleeps until there is something new.
    """

    def __init__(self, step: Callable[[], bool], failed: Callable[[BaseException], None]) -> None:
        self._step = step
        self._failed = failed
        self._posted: deque[Callable[[], None]] = deque()
        self._mutex = threading.Lock()
        self._awake = False
        self._executor = ThreadPoolExecutor(1, "rollout-decode")

    @property
    def awake(self) -> bool:
        """Whether the thread is at work."""
        return self._awake

    def post(self, job: Callable[[], None]) -> None:
        """Have something done between two steps: by this thread once it is awake, or by whoever calls `run_posted`."""
        self._posted.append(job)

    def start(self) -> None:
        """Wake the thread; nothing where it is awake."""
        with self._mutex:
            if not self._awake:
                self._awake = True
                self._executor.submit(self._run)

    def run_posted(self) -> None:
        """Do what was posted, in order. The caller sees to it that no step runs meanwhile."""
        while self._posted:
            self._posted.popleft()()

    def _run(self) -> None:
        while True:
            more = False
            with ForwardErrors(self._failed):
                more = self._step()
            with self._mutex:
                if not more and not self._posted:
                    self._awake = False
                    return
