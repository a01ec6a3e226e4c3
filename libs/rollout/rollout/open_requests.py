"""State that every engine keeps of requests: names, deadlines, and a wait for other requests that are about to come."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar, get_args

from rollout.engine import PauseMode, StopReason

R = TypeVar("R")
SETTLE_TURNS = 3
"""Turns of the event loop before requests begin, so that every coroutine that is about to send one can do so."""


class OpenRequests(Generic[R]):
    """The unfinished requests by the names that their callers gave them; its length counts them.

    `end(request, reason)` is the engine's way to end a request early with the tokens so far. It is called on the
    request's event loop by a deadline, and by `cancel`.
    """

    def __init__(self, end: Callable[[R, StopReason], None]) -> None:
        self._end = end
        self._by_id: dict[str, R] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @contextmanager
    def opened(self, request: R, request_id: str | None, deadline: float | None) -> Iterator[None]:
        """Register a request inside the block: its name for `cancel`, and its deadline in `time.monotonic()` seconds.

        Raises:
            ValueError: the name is in use.
        """
        if request_id is not None:
            if request_id in self._by_id:
                raise ValueError(f"request_id {request_id!r} is in use: give each request one of its own")
            self._by_id[request_id] = request
        timer = None
        if deadline is not None:
            left = max(0.0, deadline - time.monotonic())
            timer = asyncio.get_running_loop().call_later(left, self._end, request, "deadline")
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            if request_id is not None:
                del self._by_id[request_id]

    def cancel(self, request_id: str) -> bool:
        """End a request with the tokens so far, as "abort". Return False where no request of that name is open."""
        request = self._by_id.get(request_id)
        if request is not None:
            self._end(request, "abort")
        return request is not None


async def settle(turns: int = SETTLE_TURNS) -> None:
    """Yield to other coroutines on this event loop, so that they can send requests too."""
    for _ in range(turns):
        await asyncio.sleep(0)


def check_pause(mode: PauseMode) -> None:
    """Raise ValueError for an unknown mode."""
    if mode not in get_args(PauseMode):
        raise ValueError(f'pause mode is "finish" or "abort", got {mode!r}')
