"""A user's environment in a thread of its own: whatever its methods do, sampling goes on.

1. Each environment has one thread with one event loop, from its making to its close: what it binds to either (a
   client, a lock, a database) holds from method to method, and its own tasks go on between them.
2. A method that does not return in time fails the episode, to be tried again. One that awaits is cancelled; one that
   blocks keeps its thread, which nothing waits for, and closes the environment when it returns.
3. Abandoned threads are counted by the environment's name; past a bound no more of its environments are made.
4. A conversation with the policy that an environment begins (a sub-agent) is played on the loop that samples.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rollout.chat.messages import Message, Reply
from rollout.environments.blocking import ENVIRONMENTS
from rollout.environments.environment import (
    Converse,
    End,
    Environment,
    EnvironmentFactory,
    EpisodeContext,
    Observation,
    Score,
    StepResult,
)
from rollout.errors import EpisodeFailed, error_text
from rollout.tools.tool import Tool
from rollout.tools.workers import Ended, RefusedError
from seqpack.renamed import renamed

TIMEOUT = 600.0  # seconds that a method may take where the factory has no `timeout`
GRACE = 1.0  # seconds in which an abandoned thread may still close its environment


async def host(factory: EnvironmentFactory) -> Environment:
    """Make the environment of an episode: on this loop where the factory is marked `instant`, else in a thread.

    Raises whatever the factory raises, EpisodeFailed where its earlier environments hang, and ValueError for a
    `timeout` of the factory that is no number above 0.
    """
    if getattr(factory, "instant", False):
        return factory()
    hosted = ThreadEnvironment(factory)
    await hosted.start()
    return hosted


class ThreadEnvironment:
    """An environment that lives in a thread; its methods are awaited from the loop that samples."""

    def __init__(self, factory: EnvironmentFactory) -> None:
        self._factory = factory
        self._name = getattr(factory, "__qualname__", type(factory).__qualname__)
        self._timeout = getattr(factory, "timeout", TIMEOUT)
        if not isinstance(self._timeout, int | float) or not self._timeout > 0:
            raise ValueError(f"{self._name}.timeout must be more than 0 seconds, got {self._timeout!r}")
        self._outside = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._outside.create_future()
        self._environment: Any = None
        self._given_up = False  # a call did not return: its thread may hang
        self.hung = False  # the thread did not end after close()
        self._inside: asyncio.AbstractEventLoop
        self._end: asyncio.Event

    async def start(self) -> None:
        """Start the thread, and make the environment in it."""
        self._life = asyncio.ensure_future(ENVIRONMENTS.run(self._name, math.inf, self._live))
        try:
            await asyncio.wait((self._ready, self._life), return_when=asyncio.FIRST_COMPLETED)
            if not self._ready.done():
                self._life.result()  # RefusedError
            self._environment = await self._call("the environment's factory", self._factory)
        except RefusedError as refused:
            raise EpisodeFailed(f"{self._name} is refused: {refused}", retryable=False) from None
        finally:
            if self._environment is None:
                await self._leave()

    async def open(self, context: EpisodeContext) -> Observation:
        """Open the environment; its conversations are played on the loop that samples."""
        inside = replace(context, converse=partial(self._converse, context.converse))
        opening: Observation = await self._call("open()", self._environment.open, inside)
        return opening

    async def step(self, reply: Reply) -> StepResult:
        """Run the environment's own step in the thread."""
        outcome: StepResult = await self._call("step()", self._environment.step, reply)
        return outcome

    async def finish(self, end: End) -> Score:
        """Return the environment's own score."""
        score: Score = await self._call("finish()", self._environment.finish, end)
        return score

    async def close(self) -> None:
        """Close the environment, then end its thread."""
        try:
            if self._given_up:
                self._timeout = min(self._timeout, GRACE)
            await self._call("close()", self._environment.close)
        finally:
            await self._leave()

    async def _call(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a method in the thread: return its result, or raise what it raises."""
        answer = self._start_call(function, arguments)
        answered = False
        try:
            async with asyncio.timeout(None if math.isinf(self._timeout) else self._timeout):
                ended = await answer
            answered = True
        except TimeoutError:
            reason = f"{what} of {self._name} gave no answer within {self._timeout:g} s"
            raise EpisodeFailed(reason, retryable=True) from None
        finally:
            self._given_up = self._given_up or not answered
        if isinstance(ended.error, Exception):
            raise ended.error
        if ended.error is not None:  # SystemExit and the like must not end the run
            raise EpisodeFailed(f"{what} raised {error_text(ended.error)}", False) from ended.error
        return ended.value

    def _start_call(self, function: Callable[..., Any], arguments: Sequence[Any]) -> "asyncio.Future[Ended]":
        """Start a call on the thread's loop; return a future on this loop, whose cancellation cancels the call.

        The call begins in any case, also where it was cancelled before the thread came free: close() has to be called.
        `asyncio.run_coroutine_threadsafe` promises no such thing: Python 3.13.5 began it, 3.13.18 does not.
        """
        inside, outside = self._inside, self._outside
        answer: asyncio.Future[Ended] = outside.create_future()
        made: list[asyncio.Task[None]] = []
        started = False

        def settle(ended: Ended) -> None:
            if not answer.done():
                answer.set_result(ended)

        async def attempt() -> None:
            nonlocal started
            started = True
            ended = await _attempt(function, arguments)
            with contextlib.suppress(RuntimeError):  # that loop was closed meanwhile: nothing waits
                outside.call_soon_threadsafe(settle, ended)

        def cancel() -> None:
            if started:
                made[0].cancel()
            else:
                inside.call_soon(made[0].cancel)  # after its first step

        def stop(answer: "asyncio.Future[Ended]") -> None:
            if answer.cancelled():
                with contextlib.suppress(RuntimeError):
                    inside.call_soon_threadsafe(cancel)

        inside.call_soon_threadsafe(lambda: made.append(inside.create_task(attempt())))
        answer.add_done_callback(stop)
        return answer

    async def _leave(self) -> None:
        """Let the thread end now, or when its method returns."""
        try:
            if self._ready.done():
                self._inside.call_soon_threadsafe(self._end.set)
                await asyncio.wait([self._life], timeout=GRACE)
                self.hung = not self._life.done()
        finally:
            self._life.cancel()
            await asyncio.gather(self._life, return_exceptions=True)

    # -- inside the thread -----------------------------------------------------------------------------------------

    def _live(self) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._inside, self._end = asyncio.get_running_loop(), asyncio.Event()
        self._outside.call_soon_threadsafe(self._begun)
        await self._end.wait()

    def _begun(self) -> None:
        if not self._ready.done():
            self._ready.set_result(None)

    def _converse(
        self, converse: Converse, messages: Sequence[Message], tools: Sequence[Tool] = (), agent: str = "sub"
    ) -> Any:
        return OutsideConversation(_run_on(self._outside, converse, messages, tools, agent), self._outside)


class OutsideConversation:
    """A `Conversation` for an environment in a thread: its methods run on the loop that samples."""

    def __init__(self, conversation: Any, outside: asyncio.AbstractEventLoop) -> None:
        self._conversation, self._outside = conversation, outside

    async def reply(self) -> Reply:
        """Sample one turn."""
        future = asyncio.run_coroutine_threadsafe(self._conversation.reply(), self._outside)
        return await asyncio.wrap_future(future)

    def add_messages(self, messages: Sequence[Message]) -> bool:
        """Add the messages of others."""
        result: bool = _run_on(self._outside, self._conversation.add_messages, messages)
        return result

    say = renamed("add_messages")

    def go_on_from(self, messages: Sequence[Message]) -> bool:
        """Start a new stream from other messages."""
        result: bool = _run_on(self._outside, self._conversation.go_on_from, messages)
        return result

    def fork(self, agent: str) -> "OutsideConversation":
        """Return a branch of the conversation."""
        return OutsideConversation(_run_on(self._outside, self._conversation.fork, agent), self._outside)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._conversation, name)


async def _attempt(function: Callable[..., Any], arguments: Sequence[Any]) -> Ended:
    """Run a user's code; what it raises is returned as data and ends no loop."""
    try:
        value = function(*arguments)
        return Ended(await value if asyncio.iscoroutine(value) or hasattr(value, "__await__") else value)
    except BaseException as error:  # noqa: BLE001
        return Ended(error=error)


def _run_on(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on another loop and wait for its result in this thread alone."""

    async def call() -> Any:
        value = function(*arguments)
        return await value if asyncio.iscoroutine(value) else value  # a coroutine: the policy is in another process

    return asyncio.run_coroutine_threadsafe(call(), loop).result()
