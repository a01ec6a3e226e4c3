"""Threads that can be abandoned: users' code runs beside the event loop and can't block it.

1. A call runs in an idle daemon thread, or in a new one: a call never waits for another.
2. Where it returns an awaitable, that is awaited on an event loop of the call's own, so that code which blocks inside
   `async def` blocks nothing else; with `one_loop` on one of all calls, so that they may share clients, which are bound
   to a loop. One that is blocked when a call is past its limit gets no further calls.
3. Past its time limit (or when the caller is cancelled) an awaiting call is cancelled; one that goes on is abandoned:
   nothing waits for its thread, which can't be killed.
4. While a call waits for a resource that other calls hold (`waiting`), its time limit stands still.
5. Abandoned threads are counted by key until they end. A key that has `max_abandoned` of them, and more than one of
   ten of its calls, is refused: a tool that always hangs costs a bounded number of threads, and one that rarely does
   goes on.

Invariants: an outcome is delivered once or never; a thread takes its next call only after the one before has ended;
whatever the code raises (SystemExit, KeyboardInterrupt, CancelledError too) is data and kills no thread.
"""

import asyncio
import contextvars
import inspect
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])
MAX_IDLE = 32  # threads kept for the next calls
SHARE = 0.1  # of a key's calls, which may be abandoned


class OverrunError(TimeoutError):
    """A call did not return within its time limit. (A TimeoutError of the code itself is an `Ended.error`.)"""


class RefusedError(RuntimeError):
    """Too many earlier calls of the same key are still running past their limit."""


class Ended(NamedTuple):
    """The end of a call: its value, or what it raised."""

    value: Any = None
    error: BaseException | None = None


def instant(function: Function) -> Function:
    """Mark a plain function that can't block, whatever it is given: it runs on the event loop, which saves a thread.

    An environment's factory (its class, say) is marked where nothing of the environment blocks. No time limit holds for
    what is marked. Raises ValueError for a coroutine function.
    """
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"{function.__name__} awaits, so it is not instant: take the mark off")
    function.instant = True  # type: ignore[attr-defined]
    return function


@contextmanager
def waiting() -> Iterator[None]:
    """Stop the time limit of the running call while it waits for a resource that others hold (a free process, say).

    The wait itself needs a bound of its own. Outside a call of `Workers` this does nothing.
    """
    call = _CALL.get()
    if call is None:
        yield
        return
    call.hold(+1)
    try:
        yield
    finally:
        call.hold(-1)


class Workers:
    """A pool of daemon threads that run blocking or async code.

    `name` is that of its threads. With `one_loop` async calls share a loop. Raises ValueError for a bound below 1.
    """

    def __init__(self, name: str, max_abandoned: int = 8, one_loop: bool = False) -> None:
        if max_abandoned < 1:
            raise ValueError(f"max_abandoned must be at least 1, got {max_abandoned}")
        self.name = name
        self.max_abandoned = max_abandoned
        self.one_loop = one_loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._answered = threading.Event()  # by the loop, since a call on it was abandoned
        self._answered.set()
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._abandoned: Counter[str] = Counter()
        self._begun: Counter[str] = Counter()

    def abandoned(self, key: str) -> int:
        """Count the abandoned calls of this key that still run."""
        with self._lock:
            return self._abandoned[key]

    async def run(self, key: str, timeout: float, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Ended:
        """Call a function, await its result if that can be awaited, and return how it ended.

        `timeout` is in seconds; infinity waits for ever. Raises OverrunError past it and RefusedError where `key` has
        `max_abandoned` calls that still run.
        """
        if getattr(function, "instant", False):
            return _attempt(partial(function, *args, **kwargs), (Exception, SystemExit))  # Ctrl-C is the caller's
        with self._lock:
            self._begun[key] += 1
            if self._abandoned[key] >= max(self.max_abandoned, SHARE * self._begun[key]):
                raise RefusedError(f"{self._abandoned[key]} earlier calls of {key} still run past their time limit")
        call = _Call(self, key, partial(function, *args, **kwargs))
        try:
            async with asyncio.timeout(None if math.isinf(timeout) else timeout) as call.limit:
                self._take_worker().inbox.put(call)
                return await call.outcome
        except TimeoutError:
            raise OverrunError(f"no answer within {timeout:g} s") from None
        finally:
            call.abandon()

    def loop(self) -> asyncio.AbstractEventLoop:
        """Return the event loop of all calls, which a thread of its own runs; a new one where it is blocked."""
        answers = self._answered.wait(1.0)
        with self._lock:
            if self._loop is None or not answers:
                self._loop = asyncio.new_event_loop()
                self._answered.set()
                threading.Thread(
                    target=_serve, args=(self._loop,), name=f"rollout-{self.name}-loop", daemon=True
                ).start()
            return self._loop

    def _take_worker(self) -> "_Worker":
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_alive():  # after a fork the threads are not alive in the child
                    return worker
        worker = _Worker(self)
        worker.start()
        return worker

    def _keep(self, worker: "_Worker") -> bool:
        """Return whether the thread, which is free now, should wait for another call."""
        with self._lock:
            if len(self._idle) >= MAX_IDLE:
                return False
            self._idle.append(worker)
            return True

    def _count(self, key: str, change: int) -> None:
        with self._lock:
            self._abandoned[key] += change
            if not self._abandoned[key]:
                del self._abandoned[key]


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run an event loop for ever; what ends one (sys.exit() in a task) is that task's alone."""
    while True:
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


def _attempt(function: Callable[[], Any], caught: tuple[type[BaseException], ...]) -> Ended:
    """Run a user's code; what it raises is returned as data."""
    try:
        return Ended(function())
    except caught as error:
        return Ended(error=error)


class _Worker(threading.Thread):
    """One daemon thread; takes calls from its inbox until its pool has enough idle ones."""

    def __init__(self, pool: Workers) -> None:
        super().__init__(name=f"rollout-{pool.name}", daemon=True)
        self.pool = pool
        self.inbox: SimpleQueue[_Call] = SimpleQueue()

    def run(self) -> None:
        """Run one call after the other."""
        while True:
            call = self.inbox.get()
            outcome = call.play()
            waits = self.pool._keep(self)  # before the outcome is out, so that the next call finds this thread
            call.deliver(outcome)
            del call, outcome  # a waiting thread must not keep its last call alive
            if not waits:
                return


class _Call:
    """One call, shared by the event loop that waits for it and the thread that runs it."""

    def __init__(self, pool: Workers, key: str, function: Callable[[], Any]) -> None:
        self.outcome: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.limit: asyncio.Timeout | None = None
        self._pool = pool
        self._key = key
        self._function = function
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._ended = self._is_abandoned = False
        self._cancel: Callable[[], object] | None = None
        self._holds = 0  # running waits; these fields are used on the waiting loop alone
        self._left: float | None = None  # seconds that were left when the first of them began

    def play(self) -> Ended:
        """Run the call in the thread; an awaitable is awaited on a loop of the call's own."""
        token = self._context.run(_CALL.set, self)
        try:
            return _attempt(self._play, (BaseException,))
        finally:
            self._context.run(_CALL.reset, token)

    def _play(self) -> Any:
        value = self._context.run(self._function)
        if not inspect.isawaitable(value):
            return value
        if self._pool.one_loop:
            running = self._context.run(asyncio.run_coroutine_threadsafe, self._cancellable(value), self._pool.loop())
            try:
                return running.result()
            except futures.CancelledError:  # another class than the one that a loop of its own would raise
                raise asyncio.CancelledError from None
        with asyncio.Runner() as runner:
            return runner.run(self._cancellable(value), context=self._context)

    async def _cancellable(self, value: Any) -> Any:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        with self._lock:
            if self._is_abandoned:  # before it began: close it, as Python warns of coroutines that were never awaited
                if inspect.iscoroutine(value):
                    value.close()
                raise asyncio.CancelledError
            self._cancel = partial(loop.call_soon_threadsafe, task.cancel)
        try:
            return await value
        finally:
            with self._lock:  # the loop is closed after this and must not be used any more
                self._cancel = None

    def hold(self, change: int) -> None:
        """Stop the clock of the time limit (+1), or restart it (-1), from the thread."""
        try:
            self.outcome.get_loop().call_soon_threadsafe(self._hold, change)
        except RuntimeError:  # that loop was closed meanwhile: nobody waits
            return

    def _hold(self, change: int) -> None:
        self._holds += change
        limit, loop = self.limit, self.outcome.get_loop()
        if limit is None or limit.expired() or self.outcome.done() or self._is_abandoned:
            return
        when = limit.when()
        if self._holds and when is not None:
            self._left = when - loop.time()
            limit.reschedule(None)
        elif not self._holds and self._left is not None:
            limit.reschedule(loop.time() + self._left)
            self._left = None

    def deliver(self, outcome: Ended) -> None:
        """Send the outcome to the waiting loop, or uncount an abandoned call, from the thread at its end."""
        with self._lock:
            self._ended = True
            abandoned = self._is_abandoned
        if abandoned:
            self._pool._count(self._key, -1)
            return
        try:
            self.outcome.get_loop().call_soon_threadsafe(self._set, outcome)
        except RuntimeError:  # that loop was closed meanwhile: nobody waits
            return

    def _set(self, outcome: Ended) -> None:
        if not self.outcome.done():
            self.outcome.set_result(outcome)

    def abandon(self) -> None:
        """Leave the call alone if it has not ended, from the waiting loop; cancel it if it is async."""
        with self._lock:
            if self._ended:
                return
            self._is_abandoned = True
            self._pool._count(self._key, +1)
            if self._cancel is not None:
                self._cancel()
                if self._pool.one_loop and (loop := self._pool._loop) is not None:
                    self._pool._answered.clear()
                    loop.call_soon_threadsafe(self._pool._answered.set)


_CALL: ContextVar[_Call | None] = ContextVar("call", default=None)  # the call that runs in this context
TOOLS = Workers("tool")
REWARDS = Workers("reward")
