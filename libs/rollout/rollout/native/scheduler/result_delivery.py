"""Delivery of results from the decoding thread to the event loops that wait."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from rollout.engine import OnTokens
from rollout.errors import ForwardErrors


class ResultDelivery:
    """Results for futures; `send` wakes each loop once, however many of its futures get one."""

    def __init__(self) -> None:
        self._collected: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}

    def put(self, future: "asyncio.Future[Any]", answer: Any) -> None:
        """Store a future's result, or an exception."""
        self._post(future, lambda: _resolve(future, answer))

    def stream(self, future: "asyncio.Future[Any]", on_tokens: OnTokens) -> Callable[[int, float], None]:
        """Return a function that takes a token and its log-prob and passes them to `on_tokens` in the future's loop.
        What `on_tokens` raises becomes the future's exception."""
        fresh: deque[tuple[int, float]] = deque()

        def deliver() -> None:
            new = [fresh.popleft() for _ in range(len(fresh))]  # the decoding thread may append meanwhile
            if new and not future.done():
                ids, log_probs = zip(*new, strict=True)
                with ForwardErrors(lambda error: _resolve(future, error)):
                    on_tokens(ids, log_probs)

        def take(token: int, log_prob: float) -> None:
            fresh.append((token, log_prob))
            self._post(future, deliver)

        return take

    def _post(self, future: "asyncio.Future[Any]", call: Callable[[], None]) -> None:
        self._collected.setdefault(future.get_loop(), []).append(call)

    def send(self) -> None:
        """Send all stored results, from any thread; those of closed loops are dropped."""
        collected, self._collected = self._collected, {}
        for loop, calls in collected.items():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_call_all, calls)


def _call_all(calls: list[Callable[[], None]]) -> None:
    for call in calls:
        call()


def _resolve(future: "asyncio.Future[Any]", answer: Any) -> None:
    if future.done():
        return
    if isinstance(answer, StopIteration):  # which no future can hold
        answer = RuntimeError(f"raised StopIteration({answer.value!r})")
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)
