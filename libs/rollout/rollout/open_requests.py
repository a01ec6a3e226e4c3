"""What a request has in every engine besides its tokens: a name, a deadline, and others that are about to ask too."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar, get_args

from rollout.engine import PauseMode, StopReason

R = TypeVar("R")
SETTLE_TURNS = 3
"""Turns of the event loop before requests begin, so that every coroutine that is about to ask can ask."""


class OpenRequests(Generic[R]):
    """The requests that are not answered, by the names that their callers gave them; its length counts those.

    `end(request, reason)` is the engine's own way to answer a request early with what it has. It is called on the
    request's event loop by a deadline, and wherever `cancel` is called.
    """

    def __init__(self, end: Callable[[R, StopReason], None]) -> None:
        self._end = end
        self._by_id: dict[str, R] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    @contextmanager
    def opened(self, request: R, request_id: str | None, deadline: float | None) -> Iterator[None]:
        """Inside, the request can be cancelled by its name and ends at its deadline, in `time.monotonic()` seconds.

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
        """End a request with what it has, and stop_reason "abort". False: nobody of that name waits or runs."""
        request = self._by_id.get(request_id)
        if request is not None:
            self._end(request, "abort")
        return request is not None


async def settle(turns: int = SETTLE_TURNS) -> None:
    """Let others on this event loop ask as well."""
    for _ in range(turns):
        await asyncio.sleep(0)


def check_pause(mode: PauseMode) -> None:
    """ValueError: no such way to pause."""
    if mode not in get_args(PauseMode):
        raise ValueError(f'pause mode is "finish" or "abort", got {mode!r}')
