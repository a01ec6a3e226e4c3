"""What is done while ranks run in actors: forward their lines and this process's signals, and end with the one that
fails."""

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from apps.common.launch.rank_actor import Output, Place
from schedules.ray.cluster import ray_module

GRACE = 30.0
"""Seconds that the other ranks have once one has ended with an error, as under torchrun; then they are killed."""
_TOGETHER = 1.0
"""Seconds within which errors count as one: then a rank that was killed is the cause, and the others lost it."""
_STOPS = (signal.SIGINT, signal.SIGTERM)
_WORDS = 5
"""Last lines of a rank that are told."""


@dataclass(frozen=True)
class End:
    """The end of a rank: its exit status, negative where a signal ended it, or what Ray says of its loss; and when."""

    rank: int
    status: int | None
    lost: str
    when: float

    @property
    def died(self) -> bool:
        """Whether it could say nothing."""
        return self.status is None or self.status < 0

    def __str__(self) -> str:
        if self.status is None:
            return f"was lost ({self.lost})"
        if self.status < 0:
            return f"was ended by {signal.Signals(-self.status).name}"
        return f"ended with status {self.status}"


class RankMonitor:
    """The ranks of a run from their start to their end."""

    def __init__(self, actors: Sequence[Any], places: Sequence[Place]) -> None:
        self._actors, self._places = actors, places
        self._ray, self._errors = ray_module("ray"), ray_module("ray.exceptions")
        self._pending: dict[Any, int] = {}
        self._words: list[deque[str]] = [deque(maxlen=_WORDS) for _ in actors]
        self._ends: list[End] = []
        self._stops: list[int] = []
        self._killed: float | None = None

    def until_end(self) -> int:
        """Return the exit status of the command once all ranks have ended, and forward lines and signals until then."""
        for rank in range(len(self._actors)):
            self._ask(rank)
        told = 0
        with _noted_stops(self._stops):
            while self._pending and not self._given_up():
                for number in self._stops[told:]:
                    told += 1
                    self._send(signal.SIGKILL if told > 2 else number)
                done, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=0.2)
                for answer in done:
                    self._take(answer)
                self._kill_rest()
        return self._status()

    def _ask(self, rank: int) -> None:
        self._pending[self._actors[rank].read.remote()] = rank

    def _take(self, answer: Any) -> None:
        rank = self._pending.pop(answer)
        try:
            output: Output = self._ray.get(answer)
        except self._errors.ActorUnavailableError:  # Ray looks whether its machine is gone
            time.sleep(0.2)
            return self._ask(rank)
        except self._errors.RayActorError as error:
            self._ends.append(End(rank, None, str(error).strip().splitlines()[0], time.monotonic()))
            return None
        for to_error, line in output.lines:
            (sys.stderr if to_error else sys.stdout).write(f"[rank {rank}] {line}\n")
            self._words[rank].append(line)
        sys.stdout.flush()
        if output.status is None:
            return self._ask(rank)
        self._ends.append(End(rank, output.status, "", time.monotonic()))
        return None

    def _send(self, number: int) -> None:
        for rank in self._pending.values():
            self._actors[rank].send.remote(number)

    def _failures(self) -> list[End]:
        return [end for end in self._ends if end.status != 0]

    def _kill_rest(self) -> None:
        failed = self._failures()
        if failed and self._killed is None and time.monotonic() > failed[0].when + GRACE:
            self._killed = time.monotonic()
            self._send(signal.SIGKILL)

    def _given_up(self) -> bool:
        """Return whether ranks that were killed still do not answer: Ray has not yet noticed that they are lost."""
        return self._killed is not None and time.monotonic() > self._killed + GRACE

    def _status(self) -> int:
        """Tell of the rank that failed first, and return the exit status."""
        failed = self._failures()
        if not failed:
            return 0
        together = [end for end in failed if end.when <= failed[0].when + _TOGETHER]
        first = next((end for end in together if end.died), together[0])
        stopped = 128 + self._stops[0] if self._stops else None
        if first.status is not None and stopped in (first.status, 128 - first.status):
            return stopped
        place = self._places[first.rank]
        words = "".join(f"\n  {line}" for line in self._words[first.rank])
        sys.stderr.write(
            f"rank {first.rank} on {place.host} ({place.address}) {first}; its last words:{words or ' none'}\n"
        )
        if stopped is not None:
            return stopped
        status = 1 if first.status is None else first.status
        return status if status > 0 else 128 - status


@contextmanager
def _noted_stops(stops: list[int]) -> Iterator[None]:
    """Note SIGINT and SIGTERM in a list while this is open; only the main thread may handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, lambda came, _: stops.append(came)) for number in _STOPS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
