"""Decoding in a thread of its own while there is work."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from rollout.errors import ForwardErrors


class DecodeThread:
    """A thread that calls `step()` again and again as long as it returns True, and sleeps otherwise.

    `post` schedules a job between two steps; `start` wakes the thread. Neither waits. An exception of a step is passed
    to `failed`, in the thread, which then sleeps until there is new work.
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
        """Schedule a job between two steps: by this thread once it is awake, or by a caller of `run_pending`."""
        self._posted.append(job)

    def start(self) -> None:
        """Wake the thread; do nothing where it is awake."""
        with self._mutex:
            if not self._awake:
                self._awake = True
                self._executor.submit(self._run)

    def run_pending(self) -> None:
        """Run the posted jobs, in order. The caller ensures that no step runs meanwhile."""
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
