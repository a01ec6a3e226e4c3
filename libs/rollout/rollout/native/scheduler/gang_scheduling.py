"""Requests that begin together, so that a run repeats to the bit.

Which rows share a decode step decides the last bits of their log-probs. Where requests join at any step, that depends
on the speed of threads; in rounds it follows from the requests alone.

1. A request that comes while a round runs begins with the next one.
2. A caller that will send more requests uses `request_scope`: the next round waits until all such callers have sent
   one, so that neither a slow environment nor a fast one splits it.
3. It waits at most as long as the last round took, or `PATIENCE` seconds: an environment that hangs delays the others
   no longer.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rollout.native.decoders.media import shown
from rollout.native.scheduler.request import SequenceRequest
from rollout.open_requests import settle

SETTLE_TURNS = 16
"""Turns of the event loop before a round begins, in which coroutines that wait for nothing else send requests."""
PATIENCE = 0.25
"""Seconds that a round waits at least for missing requests."""


def _order(request: SequenceRequest) -> tuple[int, bytes, tuple[int, ...], int]:
    return len(request.prompt), shown(request.prompt), request.prompt, request.seed


class GangScheduler:
    """A queue that starts requests in rounds, each sorted by content.

    Used from one event loop at a time; with another loop it starts anew.
    """

    def __init__(self, begin: Callable[[list[SequenceRequest]], None]) -> None:
        self._begin = begin
        self._loop: asyncio.AbstractEventLoop | None = None
        self._start_anew()

    def ask(self, request: SequenceRequest, answer: "asyncio.Future[Any]") -> None:
        """Add a request to the next round. It leaves the round when `answer` is done."""
        self._use_running_loop()
        self._asked.append(request)
        answer.add_done_callback(lambda _: self._leave(request))
        self._wake()

    @contextmanager
    def request_scope(self) -> Iterator[None]:
        """Count a caller that sends one request after another inside: a round waits for its next one."""
        self._use_running_loop()
        mine = self._loop
        self._present += 1
        try:
            yield
        finally:
            if mine is self._loop:
                self._present -= 1
                self._news.set()

    def start_now(self, request: SequenceRequest) -> None:
        """Start a request that still waits for its round now, because it is to be ended."""
        if request in self._asked:
            self._asked.remove(request)
            self._begin([request])

    def _start_anew(self) -> None:
        self._asked: list[SequenceRequest] = []
        self._running: set[int] = set()
        self._opening: asyncio.Task[None] | None = None
        self._present = 0
        self._news = asyncio.Event()
        self._begun, self._took = 0.0, 0.0

    def _use_running_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._loop = loop
            self._start_anew()

    def _leave(self, request: SequenceRequest) -> None:
        if id(request) in self._running:
            self._running.remove(id(request))
            self._took = asyncio.get_running_loop().time() - self._begun
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        if self._asked and not self._running and (self._opening is None or self._opening.done()):
            self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        await settle(SETTLE_TURNS)
        await self._all_asked()
        requests = sorted(self._asked, key=_order)
        self._asked = []
        self._running = {id(request) for request in requests}
        if requests:
            self._begun = asyncio.get_running_loop().time()
            self._begin(requests)

    async def _all_asked(self) -> None:
        """Wait until all present callers have sent a request, or none is waiting, or the time is over."""
        try:
            async with asyncio.timeout(max(PATIENCE, self._took)):
                while 0 < len(self._asked) < self._present:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            pass
