"""What the progress line says while a step samples: held by the order of what is shown, not by time."""

import asyncio
import threading
from concurrent.futures import Future
from typing import Any, Never

import pytest

from rollout import Chat, EpisodeContext, Observation, Reply, Sampling, Score, StepResult, TaskRow, run_group
from rollout.engine import Load
from rollout.environments.environment import End
from rollout.episodes.runner import together
from rollout.errors import EpisodeFailed
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.scripted import ScriptedEngine
from rollout.tools.workers import instant
from rollout.workers.process import WorkerDied
from schedules.reporting import live as module
from schedules.reporting.live import CountedFactory, Live, MeteredEngine, RemoteLoad

CHAT = Chat(tiny_tokenizer())


class Gated:
    """A turn that takes a permit to open and one to end."""

    opens: threading.Semaphore
    ends: threading.Semaphore

    async def open(self, context: EpisodeContext) -> Observation:
        self.opens.acquire()
        return Observation([{"role": "user", "content": "x"}])

    async def step(self, reply: Reply) -> StepResult:
        self.ends.acquire()
        return StepResult()

    async def finish(self, end: End) -> Score:
        return Score(1.0)

    async def close(self) -> None:
        pass


class Busy(ScriptedEngine):
    """Tells a load of its own."""

    now = Load(0, 0)

    def load(self) -> Load:
        return self.now


def test_the_line_follows_episodes_from_their_opening_to_their_close(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 0.001)
    Gated.opens, Gated.ends = threading.Semaphore(0), threading.Semaphore(0)
    shown: list[dict[str, Any]] = []
    live = Live(show=lambda values: shown.append(dict(values)))
    engine = Busy(lambda prompt, turn: [CHAT.end_of_turn_id])

    async def until(text: str, requests: str = "0 running, 0 waiting") -> None:
        while not shown or shown[-1] != {"episodes": text, "requests": requests}:
            await asyncio.sleep(0.001)

    async def main() -> None:
        async with live.step(2):
            counted = MeteredEngine(engine, live)
            made, sampling = CountedFactory(Gated, live), Sampling(max_new_tokens=4)
            jobs = together(run_group(made, counted, CHAT, sampling, size=1, row=TaskRow(name)) for name in "ab")
            playing = asyncio.ensure_future(jobs)
            await until("0/2, 2 in flight")
            Gated.opens.release(2)
            engine.now = Load(2, 3)
            await until("0/2, 2 in flight", "2 running, 3 waiting")
            engine.now = Load(0, 0)
            Gated.ends.release()
            await until("1/2, 1 in flight")
            Gated.ends.release()
            await playing

    asyncio.run(asyncio.wait_for(main(), 120))
    episodes = [value["episodes"] for value in shown]
    order = ["0/2, 0 in flight", "0/2, 1 in flight", "0/2, 2 in flight", "1/2, 1 in flight", "2/2, 0 in flight"]
    assert [order.index(value) for value in episodes] == sorted(order.index(value) for value in episodes)
    assert shown[-1] == {"episodes": "2/2, 0 in flight", "requests": "0 running, 0 waiting"}


@pytest.mark.parametrize("broken", [False, True])
def test_an_agents_group_is_counted_whatever_becomes_of_it(broken: bool) -> None:
    live = Live()
    seen = []

    class Agents:
        async def run_group(self, *arguments: Any, size: int, **options: Any) -> list[Any]:
            seen.append(live.values()["episodes"])
            if broken:
                raise EpisodeFailed("gone", retryable=False)
            return []

        def __call__(self) -> Never:
            raise AssertionError

    async def main() -> None:
        async with live.step(4):
            await run_group(CountedFactory(Agents(), live), ScriptedEngine(lambda p, t: []), CHAT, Sampling(), size=4)

    if broken:
        with pytest.raises(EpisodeFailed):
            asyncio.run(main())
    else:
        asyncio.run(main())
    assert seen == ["0/4, 4 in flight"]
    assert live.values()["episodes"] == "4/4, 0 in flight"


def test_a_counted_factory_is_marked_as_its_own_is() -> None:
    class Slow(Gated):
        timeout = 3.0

    counted: Any = CountedFactory(Slow, Live())
    assert (counted.timeout, hasattr(counted, "instant"), hasattr(counted, "score_group")) == (3.0, False, False)
    marked: Any = CountedFactory(instant(Slow), Live())
    assert marked.instant
    assert counted.__qualname__ == Slow.__qualname__


def test_groups_that_overlap_are_counted_together() -> None:
    """As a process plays them for a fully asynchronous run."""
    live = Live()

    async def main() -> None:
        async with live.step(4):
            live.count(started=4)
            async with live.step(4):
                live.count(started=4, ended=3)
                assert live.values() == {"episodes": "3/8, 5 in flight"}
        live.count(ended=5)
        async with live.step(2):
            assert live.values() == {"episodes": "0/2, 0 in flight"}

    asyncio.run(main())


class Elsewhere:
    """Samplers whose answers come when the test says so."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked: list[list[Future[Any]]] = []

    def call_all(self, name: str) -> list[Future[Any]]:
        assert name == "load"
        self.asked.append([Future() for _ in range(self.count)])
        return self.asked[-1]

    def answer(self, index: int, **load: int) -> None:
        self.asked[-1][index].set_result(({"answer": load}, b""))


def test_samplers_elsewhere_are_asked_without_waiting() -> None:
    pool: Any = Elsewhere(2)
    load = RemoteLoad()
    assert load.values(pool) == {}
    pool.answer(0, episodes=3, running=2, waiting=1)
    assert load.values(pool) == {}
    assert len(pool.asked) == 1  # one of them is yet to answer
    pool.answer(1, episodes=4, running=4, waiting=0)
    both = {"episodes": "7 in flight", "requests": "6 running, 1 waiting"}
    assert load.values(pool) == both
    for future in pool.asked[-1]:
        future.set_exception(WorkerDied("gone"))
    assert load.values(pool) == both  # until others answer
    pool.asked[-1][0].set_exception(RuntimeError("a fault of ours"))
    pool.answer(1, episodes=0, running=0, waiting=0)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        load.values(pool)
