"""The run's side of environment processes: who plays an episode, and what becomes of processes that hang or die.

1. A process plays many episodes. In how many processes is told, or follows from the CPU time that they take: one more
   where all of them are busy, up to one a core.
2. A process of which an environment hangs gets no more episodes, and is killed when its others have ended. One that
   says nothing for `stall_seconds`, takes more than `memory_gib`, or ends, fails its episodes; they are played again,
   each in a process of its own, so that the guilty one fails alone. Nothing is counted for the whole run.
3. Where more than half of the last `WINDOW` episodes of a class hung or died, one is refused, and counts as played.
"""

import asyncio
import itertools
import json
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from rollout.chat.conversation import TokensSpentError
from rollout.chat.messages import Reply
from rollout.environments.environment import End, EnvironmentFactory, EpisodeContext, Observation, Score, StepResult
from rollout.environments.processes.messages import (
    describe,
    pack_messages,
    pack_reply,
    unpack_messages,
    unpack_observation,
    unpack_step,
    unpack_tools,
)
from rollout.environments.processes.process import EnvironmentProcess
from rollout.environments.processes.resident import half_of_memory
from rollout.environments.processes.transports import LocalProcess, RemoteProcess, read_address, shared_key
from rollout.errors import EpisodeFailed, error_text

WINDOW = 64  # episodes of a class
BUSY = 0.7  # of a core
CLOSE_TIMEOUT = 60.0
STATE = ("agent", "turns", "calls", "stop_reason", "limit", "max_new_tokens")


class EnvironmentProcesses:
    """A pool of processes that play environments, begun as they are needed.

    `count` bounds their number, 0: none, and None: as many as their measured cost asks for. `stall_seconds`: the
    longest silence of a process. `memory_gib`: what one may take, with all that it has started; None: half of the
    machine's. `servers` (HOST:PORT) play them in place of this machine (`environments.processes.serve`), in turn.
    """

    def __init__(
        self,
        count: int | None = None,
        stall_seconds: float = 120.0,
        memory_gib: float | None = None,
        servers: Sequence[str] = (),
    ) -> None:
        if count is not None and count < 0:
            raise ValueError(f"environment processes must be at least 0 (threads of the run's process), got {count}")
        if memory_gib is not None and not memory_gib > 0:
            raise ValueError(f"memory_gib of an environment process must be more than 0, got {memory_gib}")
        if servers and not count:
            raise ValueError("environment servers need a number of processes that they play in all, above 0")
        if servers:
            shared_key()  # ValueError, now rather than in an episode
        self._servers, self._next = [*map(read_address, servers)], itertools.count()
        self._placing = threading.Lock()
        self.count, self.stall_seconds = count, stall_seconds
        self._memory = half_of_memory() if memory_gib is None else int(memory_gib * (1 << 30))
        self.workers: list[EnvironmentProcess] = []
        self._lost: set[tuple[str, int]] = set()  # episodes whose process ended
        self.ends: dict[str, deque[bool]] = {}  # by class: whether the last episodes hung or died
        self._threads: set[str] = set()
        weakref.finalize(self, _kill_all, self.workers)

    def wrap(self, factory: EnvironmentFactory) -> EnvironmentFactory:
        """Return a factory whose environments live in the processes; the factory itself where it is marked instant or
        drives itself. ValueError where it can't be sent and `count` asks for processes."""
        if self.count == 0 or getattr(factory, "instant", False) or hasattr(factory, "run_group"):
            return factory
        name = getattr(factory, "__qualname__", type(factory).__qualname__)
        try:
            description = json.dumps(describe(factory)).encode()
        except TypeError as error:
            problem = f"the environment {name} can't be sent to a process: {error}; define it at the top of a file"
            if self.count is not None:
                raise ValueError(f"{problem}, or give --environment-processes 0") from None
            if name not in self._threads:
                self._threads.add(name)
                warnings.warn(f"{problem}: it is played in threads of the run's process", RuntimeWarning, stacklevel=2)
            return factory
        return _HostedFactory(self, factory, name, description)

    def close(self) -> None:
        """Kill all processes."""
        _kill_all(self.workers)

    async def place(self, name: str, context: EpisodeContext) -> "EnvironmentProcess":
        """Return the process for an episode of the class `name`. EpisodeFailed: too many of its last ones failed, or
        no server answers."""
        if not self._servers:
            return self._place(name, context)
        return await asyncio.to_thread(self._place_locked, name, context)  # a server may be slow to answer

    def _place_locked(self, name: str, context: EpisodeContext) -> "EnvironmentProcess":
        with self._placing:
            return self._place(name, context)

    def _place(self, name: str, context: EpisodeContext) -> "EnvironmentProcess":
        ends = self.ends.setdefault(name, deque(maxlen=WINDOW))
        if len(ends) == ends.maxlen and 2 * sum(ends) > len(ends):
            failed = sum(ends)
            ends.append(False)
            raise EpisodeFailed(f"{name} is refused: {failed} of its last {len(ends)} episodes hung or died", True)
        self.workers[:] = [worker for worker in self.workers if worker.alive]
        if (context.key, context.index) in self._lost:
            self._lost.discard((context.key, context.index))
            return self._begin(alone=True)
        open_to_all = [worker for worker in self.workers if not worker.retired]
        cores = len(os.sched_getaffinity(0))
        wanted = (
            min(cores, len(open_to_all) + all(w.busy > BUSY for w in open_to_all)) if self.count is None else self.count
        )
        if len(open_to_all) < max(1, wanted):
            return self._begin()
        return min(open_to_all, key=lambda worker: len(worker.episodes))

    def ended(self, name: str, context: EpisodeContext, worker: "EnvironmentProcess", failed: bool) -> None:
        """Count the end of an episode, `failed` where it hung or its process died."""
        self.ends[name].append(failed and (worker.alone or worker.alive))  # of several in a dead process nobody knows
        if not worker.alive and not worker.alone:
            self._lost.add((context.key, context.index))

    def _begin(self, alone: bool = False) -> "EnvironmentProcess":
        worker = EnvironmentProcess(self._transport(), self.stall_seconds, self._memory, alone)
        self.workers.append(worker)
        return worker

    def _transport(self) -> LocalProcess | RemoteProcess:
        """Start a process here, or on the next server that answers."""
        if not self._servers:
            return LocalProcess()
        for left in reversed(range(len(self._servers))):
            try:
                return RemoteProcess(self._servers[next(self._next) % len(self._servers)])
            except EpisodeFailed:
                if not left:
                    raise
        raise AssertionError("there is a server")


class _HostedFactory:
    """A factory of environments in processes; the rest is the wrapped factory's."""

    instant = True

    def __init__(self, pool: EnvironmentProcesses, factory: EnvironmentFactory, name: str, description: bytes) -> None:
        self._pool, self.__qualname__, self._description = pool, name, description
        if hasattr(factory, "score_group"):
            self.score_group = factory.score_group

    def __call__(self) -> "ProcessEnvironment":
        """Return an environment of one episode."""
        return ProcessEnvironment(self._pool, self.__qualname__, self._description)


_EPISODES = itertools.count()


class ProcessEnvironment:
    """One episode whose environment lives in a process; what it returns has been checked there."""

    def __init__(self, pool: EnvironmentProcesses, name: str, description: bytes) -> None:
        self._pool, self.name, self._description = pool, name, description
        self._number = next(_EPISODES)
        self._worker: EnvironmentProcess | None = None
        self._context: EpisodeContext
        self._failed = False
        self._spent: TokensSpentError | None = None  # what a sub-agent met
        self._conversations: list[Any] = []
        self._loop: asyncio.AbstractEventLoop

    async def open(self, context: EpisodeContext) -> Observation:
        """Open the environment in a process."""
        self._loop, self._context = asyncio.get_running_loop(), context
        worker = self._worker = await self._pool.place(self.name, context)
        worker.episodes[self._number] = self
        try:
            plain = describe({f.name: getattr(context, f.name) for f in fields(context) if f.name != "converse"})
        except TypeError as error:
            reason = f"the data of task {context.key}: {error}; give plain data, or --environment-processes 0"
            raise EpisodeFailed(reason, retryable=False) from None
        return unpack_observation(await self._call("open", self._description, context=plain))

    async def step(self, reply: Reply) -> StepResult:
        """Run the environment's own step."""
        return unpack_step(await self._call("step", reply=pack_reply(reply)))

    async def finish(self, end: End) -> Score:
        """Return the environment's own score."""
        head = await self._call("finish", end=end)
        return Score(head["reward"], head["components"], head["turns"])

    async def close(self) -> None:
        """Close the environment; a process of its own, or one in which something hangs, is killed with the last."""
        worker = self._worker
        if worker is None:
            return
        try:
            if worker.alive:
                async with asyncio.timeout(CLOSE_TIMEOUT):
                    await self._call("close")
        except TimeoutError:
            worker.retired = self._failed = True
            raise EpisodeFailed(f"close() did not return within {CLOSE_TIMEOUT:g} s", retryable=True) from None
        finally:
            del worker.episodes[self._number]
            self._pool.ended(self.name, self._context, worker, self._failed)
            if worker.retired and not worker.episodes and worker.alive:
                await asyncio.to_thread(worker.kill, "its episodes are over")

    async def _call(self, what: str, payload: bytes = b"", **arguments: Any) -> dict[str, Any]:
        assert self._worker is not None
        self._spent = None
        number, future = self._worker.call({"call": what, "episode": self._number, **arguments}, payload)
        try:
            head, text = await asyncio.wrap_future(future)
        except EpisodeFailed as dead:
            self._failed = True
            raise EpisodeFailed(f"{what}() of {self.name}: {dead.reason}", retryable=True) from None
        except asyncio.CancelledError:
            self._worker.send({"cancel": number})
            raise
        if head["hung"]:
            self._failed = self._worker.retired = True
        result: dict[str, Any] = json.loads(text)
        if "failed" in result:
            raise EpisodeFailed(result["failed"], result["retryable"]) from self._spent
        return result

    def on_request(self, head: dict[str, Any]) -> None:
        """Play what the environment asks of a sub-agent, on the loop that samples."""
        asyncio.run_coroutine_threadsafe(self._play(head), self._loop)

    async def _play(self, head: dict[str, Any]) -> None:
        assert self._worker is not None
        try:
            said = await self._converse(head)
        except EpisodeFailed as failed:
            said = {"failed": failed.reason, "retryable": failed.retryable}
        except TokensSpentError as spent:
            self._spent, said = spent, {"failed": str(spent), "retryable": False}
        except Exception as error:  # noqa: BLE001  of a sampler, which the environment may let pass
            said = {"failed": f"{head['what']} raised {error_text(error)}", "retryable": True}
        self._worker.send({"answer": head["ask"], "episode": self._number, **said})

    async def _converse(self, head: dict[str, Any]) -> dict[str, Any]:
        what, value = head["what"], None
        place = head.get("conversation", len(self._conversations))
        if what == "converse":
            begun = unpack_messages(head["messages"]), unpack_tools(head["tools"]), head["agent"]
            self._conversations.append(self._context.converse(*begun))
        elif what == "fork":
            self._conversations.append(self._conversations[place].fork(head["agent"]))
            place = len(self._conversations) - 1
        elif what == "reply":
            value = pack_reply(await self._conversations[place].reply())
        else:
            value = getattr(self._conversations[place], what)(unpack_messages(head["given"]))
        talk = self._conversations[place]
        tools = [[t.name, t.description, dict(t.parameters), t.timeout, t.max_characters] for t in talk.tools]
        state = {name: getattr(talk, name) for name in STATE}
        messages = pack_messages(talk.messages)
        return {"conversation": place, "value": value, "messages": messages, "tools": tools, "state": state}


def _kill_all(workers: list[EnvironmentProcess]) -> None:
    for worker in workers:
        worker.kill("the run is over")
    workers.clear()
