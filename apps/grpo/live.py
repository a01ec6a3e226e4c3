"""What goes on while a step samples: how many episodes are under way, how many requests run and wait."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from rollout import Episode, RolloutEngine
from rollout.environments.environment import End, EpisodeContext, Opening, Outcome, Reply, Score

Show = Callable[[Mapping[str, float | int | str]], None]
EVERY = 0.5  # seconds between two looks


@dataclass
class Live:
    """Counts of a step that is being sampled; `show` is told them every half second."""

    show: Show | None = None
    total: int = 0
    begun: int = 0
    ended: int = 0
    engine: RolloutEngine | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def count(self, begun: int = 0, ended: int = 0) -> None:
        """Count episodes; from any thread."""
        with self._lock:
            self.begun += begun
            self.ended += ended

    def values(self) -> dict[str, float | int | str]:
        """The counts as the progress line says them."""
        found: dict[str, float | int | str] = {
            "episodes": f"{self.ended}/{self.total}, {self.begun - self.ended} in flight"
        }
        if self.engine is not None:
            load = self.engine.load()
            found["requests"] = f"{load.running} running, {load.waiting} waiting"
        return found

    @asynccontextmanager
    async def step(self, total: int) -> AsyncIterator[None]:
        """Around the sampling of `total` episodes; the last thing shown is how it ended."""
        self.total, self.begun, self.ended = total, 0, 0
        ticker = asyncio.ensure_future(self._tick()) if self.show is not None else None
        try:
            yield
        finally:
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


class CountedEngine:
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
        """An environment of one episode."""
        return CountedEnvironment(self._factory(), self._live)

    async def _run_group(self, *arguments: Any, size: int, **options: Any) -> list[Episode]:
        self._live.count(begun=size)
        try:
            episodes: list[Episode] = await self._factory.run_group(*arguments, size=size, **options)  # type: ignore[attr-defined]
            return episodes
        finally:
            self._live.count(ended=size)


class CountedEnvironment:
    """One episode; see `CountedFactory`."""

    def __init__(self, environment: Any, live: Live) -> None:
        self._environment, self._live = environment, live
        live.count(begun=1)

    async def open(self, context: EpisodeContext) -> Opening:
        """The environment's own."""
        result: Opening = await self._environment.open(context)
        return result

    async def step(self, reply: Reply) -> Outcome:
        """The environment's own."""
        result: Outcome = await self._environment.step(reply)
        return result

    async def finish(self, end: End) -> Score:
        """The environment's own."""
        result: Score = await self._environment.finish(end)
        return result

    async def close(self) -> None:
        """The environment's own, and the end of the count."""
        self._live.count(ended=1)
        await self._environment.close()
