"""What goes on while a step samples: how many episodes are under way, how many requests run and wait."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rollout import Episode, RolloutEngine
from rollout.chat.messages import Reply
from rollout.environments.environment import End, EpisodeContext, Observation, Score, StepResult
from rollout.workers.channel import Message
from rollout.workers.process import WorkerDied
from rollout.workers.protocol import Workers

Show = Callable[[Mapping[str, float | int | str]], None]
EVERY = 0.5  # seconds between two looks


@dataclass
class Live:
    """Counts of a step that is being sampled; `show` is told them every half second."""

    show: Show | None = None
    total: int = 0
    started: int = 0
    ended: int = 0
    engine: RolloutEngine | None = None
    _steps: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, started: int = 0, ended: int = 0) -> None:
        """Count episodes; from any thread."""
        with self._lock:
            self.started += started
            self.ended += ended

    def values(self) -> dict[str, float | int | str]:
        """Return the counts as the progress line says them."""
        values: dict[str, float | int | str] = {
            "episodes": f"{self.ended}/{self.total}, {self.started - self.ended} in flight"
        }
        if self.engine is not None:
            load = self.engine.load()
            values["requests"] = f"{load.running} running, {load.waiting} waiting"
        return values

    @asynccontextmanager
    async def step(self, total: int) -> AsyncIterator[None]:
        """Count the sampling of `total` episodes; the last thing shown is how it ended.

        Those that overlap are counted together.
        """
        if not self._steps:
            self.total, self.started, self.ended = 0, 0, 0
        self.total += total
        self._steps += 1
        ticker = asyncio.ensure_future(self._tick()) if self.show is not None else None
        try:
            yield
        finally:
            self._steps -= 1
            if ticker is not None:
                ticker.cancel()
                await asyncio.gather(ticker, return_exceptions=True)
            if self.show is not None:
                self.show(self.values())

    async def _tick(self) -> None:
        assert self.show is not None
        while True:
            await asyncio.sleep(EVERY)
            self.show(self.values())


class RemoteLoad:
    """What samplers in other processes are at, as they said when they were last asked: who looks does not wait."""

    def __init__(self) -> None:
        self._asked: list[Future[Message]] = []
        self._told: dict[str, float | int | str] = {}

    def values(self, workers: Workers) -> dict[str, float | int | str]:
        """Return their counts together, as the progress line says them; nothing until they have answered once."""
        if all(future.done() for future in self._asked):
            told = [f.result()[0]["answer"] for f in self._asked if not isinstance(f.exception(), WorkerDied)]
            if told:
                episodes, running, waiting = (sum(load[n] for load in told) for n in ("episodes", "running", "waiting"))
                self._told = {"episodes": f"{episodes} in flight", "requests": f"{running} running, {waiting} waiting"}
            self._asked = workers.call_all("load")
        return self._told


class PeriodicTask:
    """Thread that calls `tell` every half second from `begin` to `end`, whatever the run's thread is at."""

    def __init__(self, tell: Callable[[], object]) -> None:
        self._tell, self._over = tell, threading.Event()
        self._thread = threading.Thread(target=self._tick, name="live", daemon=True)

    def begin(self) -> None:
        """Start calling."""
        self._thread.start()

    def end(self) -> None:
        """Stop calling, once the present call has ended."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _tick(self) -> None:
        while not self._over.wait(EVERY):
            self._tell()


class MeteredEngine:
    """A sampler whose load is shown; all it does is the sampler's own."""

    def __init__(self, engine: RolloutEngine, live: Live) -> None:
        self._engine = live.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class CountedFactory:
    """A factory whose episodes are counted from their making to their close; an agent's as groups."""

    def __init__(self, factory: Callable[[], Any], live: Live) -> None:
        self._factory, self._live = factory, live
        self.__qualname__ = getattr(factory, "__qualname__", type(factory).__qualname__)
        for name in ("score_group", "instant", "timeout"):
            if hasattr(factory, name):
                setattr(self, name, getattr(factory, name))
        if hasattr(factory, "run_group"):  # an agent that drives itself
            self.run_group = self._run_group

    def __call__(self) -> "CountedEnvironment":
        """Return an environment of one episode."""
        return CountedEnvironment(self._factory(), self._live)

    async def _run_group(self, *arguments: Any, size: int, **options: Any) -> list[Episode]:
        self._live.count(started=size)
        try:
            episodes: list[Episode] = await self._factory.run_group(*arguments, size=size, **options)  # type: ignore[attr-defined]
            return episodes
        finally:
            self._live.count(ended=size)


class CountedEnvironment:
    """One episode; see `CountedFactory`."""

    def __init__(self, environment: Any, live: Live) -> None:
        self._environment, self._live = environment, live
        live.count(started=1)

    async def open(self, context: EpisodeContext) -> Observation:
        """Return the environment's own."""
        result: Observation = await self._environment.open(context)
        return result

    async def step(self, reply: Reply) -> StepResult:
        """Return the environment's own."""
        result: StepResult = await self._environment.step(reply)
        return result

    async def finish(self, end: End) -> Score:
        """Return the environment's own."""
        result: Score = await self._environment.finish(end)
        return result

    async def close(self) -> None:
        """Close the environment, and end the count."""
        self._live.count(ended=1)
        await self._environment.close()
