"""A gate for requests that run side by side; further ones wait, in order."""

import asyncio
from collections import deque


class Gate:
    """A gate with `places` for requests. Used from one event loop at a time.

    Invariants: nothing waits while a place is free, unless the gate is held; while it is held, nothing enters.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._quiet: list[asyncio.Future[None]] = []
        self._held = False
        self.inside = 0

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a place."""
        return len(self._waiting)

    async def enter(self) -> None:
        """Wait for a place, and take it."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._admit()
        entered = False
        try:
            await turn
            entered = True
        finally:
            if not entered:
                if turn in self._waiting:
                    self._waiting.remove(turn)
                elif not turn.cancelled():
                    self.leave()  # the place was granted at the moment of the cancellation

    def leave(self) -> None:
        """Free a place."""
        self.inside -= 1
        self._admit()
        if not self.inside:
            for quiet in self._quiet:
                if not quiet.done():
                    quiet.set_result(None)
            self._quiet.clear()

    async def hold(self) -> None:
        """Let no request in any more, and return once none is inside; when cancelled, release the gate."""
        self._held = True
        if not self.inside:
            return
        quiet: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._quiet.append(quiet)
        left = False
        try:
            await quiet
            left = True
        finally:
            if not left:
                self.release()

    def release(self) -> None:
        """Let waiting requests in, as far as there are places."""
        self._held = False
        self._admit()

    def _admit(self) -> None:
        while self._waiting and not self._held and self.inside < self._places:
            turn = self._waiting.popleft()
            if not turn.done():
                self.inside += 1
                turn.set_result(None)
