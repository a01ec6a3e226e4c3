"""R2: whatever an environment's own methods do, sampling goes on. Held by order of events, not by time."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar, cast

import pytest

from rollout.chat.chat import Chat
from rollout.chat.messages import Reply
from rollout.engine import Completion, RolloutEngine, Sampling
from rollout.environments.blocking import ENVIRONMENTS
from rollout.environments.environment import End, EnvironmentFactory, EpisodeContext, Observation, Score, StepResult
from rollout.environments.thread_environment import ThreadEnvironment, host
from rollout.episodes.episode import Episode
from rollout.episodes.runner import run_episode, run_group
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.scripted import ScriptedEngine
from rollout.tools.workers import instant

T = TypeVar("T")
TOKENIZER = tiny_tokenizer()
CHAT = Chat(TOKENIZER)
GUARD = 120.0  # seconds after which a test that hangs fails; nothing is measured by it
METHODS = ("factory", "open", "step", "finish", "close")


class Plain:
    """One turn, worth 1; `hook(method)` is called in each of its methods."""

    hook = staticmethod(lambda method: None)

    def __init__(self) -> None:
        self.hook("factory")

    async def open(self, context: EpisodeContext) -> Observation:
        self.hook("open")
        return Observation([{"role": "user", "content": "x"}])

    async def step(self, reply: Reply) -> StepResult:
        self.hook("step")
        return StepResult()

    async def finish(self, end: End) -> Score:
        self.hook("finish")
        return Score(1.0)

    async def close(self) -> None:
        self.hook("close")


def environment(hook: Callable[[str], object], **attributes: Any) -> type[Plain]:
    return cast(type[Plain], type("Hooked", (Plain,), {"hook": staticmethod(hook), **attributes}))


def engine() -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, turn: [CHAT.end_of_turn_id])


def play(
    made: EnvironmentFactory, sampler: RolloutEngine | None = None, **options: Any
) -> Coroutine[Any, Any, Episode]:
    return run_episode(made, sampler or engine(), CHAT, Sampling(max_new_tokens=4), **options)


def run(main: Awaitable[T]) -> T:
    return asyncio.run(asyncio.wait_for(main, GUARD))


@pytest.mark.parametrize("where", METHODS)
def test_what_blocks_in_a_method_delays_no_other_episode(where: str) -> None:
    release = threading.Event()
    reached = threading.Semaphore(0)

    def hang(method: str) -> None:
        if method == where:
            reached.release()
            release.wait()

    async def main() -> list[float]:
        stuck = [asyncio.create_task(play(environment(hang))) for _ in range(5)]
        try:
            await asyncio.to_thread(lambda: [reached.acquire() for _ in stuck])  # all of them hang, side by side
            assert (await play(Plain)).reward == 1.0
            assert not any(task.done() for task in stuck)
        finally:
            release.set()
        return [episode.reward for episode in await asyncio.gather(*stuck)]

    assert run(main()) == [1.0] * 5


def test_an_environment_has_one_thread_and_one_loop_from_its_making_to_its_close() -> None:
    seen: list[tuple[str, threading.Thread]] = []

    class Bound(Plain):
        hook = staticmethod(lambda method: seen.append((method, threading.current_thread())))

        async def open(self, context: EpisodeContext) -> Observation:
            self.loop = asyncio.get_running_loop()
            self.queue: asyncio.Queue[str] = asyncio.Queue(1)
            self.task = asyncio.create_task(self.talk())
            return await super().open(context)

        async def talk(self) -> None:
            while True:
                await self.queue.put("goes on between the methods")

        async def step(self, reply: Reply) -> StepResult:
            assert asyncio.get_running_loop() is self.loop
            assert await self.queue.get() == "goes on between the methods"
            return await super().step(reply)

        async def close(self) -> None:
            self.task.cancel()
            await super().close()

    async def main() -> tuple[Episode, Episode]:
        return await asyncio.gather(play(Bound), play(Bound))

    assert [e.error for e in run(main())] == [None, None]
    by_thread: dict[threading.Thread, list[str]] = {}
    for method, thread in seen:
        by_thread.setdefault(thread, []).append(method)
    assert list(by_thread.values()) == [list(METHODS)] * 2
    assert threading.main_thread() not in by_thread


def test_a_factory_marked_instant_stays_on_the_loop_that_samples() -> None:
    threads = set()
    made = instant(environment(lambda method: threads.add(threading.current_thread())))
    assert run(play(made)).reward == 1.0
    assert threads == {threading.main_thread()}


def test_a_method_that_blocks_past_its_time_fails_the_episode_and_closes_when_it_comes_free() -> None:
    release, closed = threading.Event(), threading.Event()
    attempts = []

    def hook(method: str) -> None:
        if method == "factory":
            attempts.append(method)
        if method == "step" and len(attempts) == 1:
            release.wait()
        if method == "close" and release.is_set():
            closed.set()

    async def main() -> None:
        made = environment(hook, timeout=0.2)
        (episode,) = await run_group(made, engine(), CHAT, Sampling(max_new_tokens=4), size=1)
        assert (episode.reward, episode.attempt, closed.is_set()) == (1.0, 1, False)
        assert ENVIRONMENTS.abandoned("Hooked") == 1
        release.set()
        await asyncio.to_thread(closed.wait)
        while ENVIRONMENTS.abandoned("Hooked"):
            await asyncio.sleep(0.01)

    run(main())


def test_a_method_that_awaits_past_its_time_is_cancelled_and_the_environment_closed() -> None:
    events = []

    class Waits(Plain):
        timeout = 0.2

        async def step(self, reply: Reply) -> StepResult:
            try:
                await asyncio.Event().wait()
            finally:
                events.append("cancelled")
            raise AssertionError("nobody sets that event")

        async def close(self) -> None:
            events.append("closed")

    episode = run(play(Waits))
    assert episode.error is not None
    assert "step() of" in episode.error
    assert "gave no answer within 0.2 s" in episode.error
    assert events == ["cancelled", "closed"]


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), OSError("gone")])
@pytest.mark.parametrize("where", METHODS[:4])
def test_whatever_a_method_raises_fails_its_episode_alone(where: str, error: BaseException) -> None:
    methods = []

    def hook(method: str) -> None:
        methods.append(method)
        if method == where:
            raise error

    async def main() -> tuple[Episode, Episode]:
        return await asyncio.gather(play(environment(hook)), play(Plain))

    broken, whole = run(main())
    assert type(error).__name__ in (broken.error or "")
    assert whole.reward == 1.0
    assert methods.count("close") == (where != "factory")


def test_environments_whose_threads_hang_are_refused_past_a_bound() -> None:
    release = threading.Event()

    def hook(method: str) -> None:
        if method == "open":
            release.wait()

    async def main() -> None:
        made = environment(hook, timeout=0.05)
        try:
            for _ in range(ENVIRONMENTS.max_abandoned):
                assert "no answer" in ((await play(made)).error or "")
            assert "Hooked is refused" in ((await play(made)).error or "")
            assert (await play(Plain)).reward == 1.0
        finally:
            release.set()
            while ENVIRONMENTS.abandoned("Hooked"):
                await asyncio.sleep(0.01)

    run(main())


def test_a_cancelled_episode_does_not_wait_for_a_method_that_blocks() -> None:
    release, reached, closed = threading.Event(), threading.Event(), threading.Event()

    def hook(method: str) -> None:
        if method == "step":
            reached.set()
            release.wait()
        if method == "close":
            closed.set()

    async def main() -> None:
        episode = asyncio.create_task(play(environment(hook)))
        await asyncio.to_thread(reached.wait)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        assert not closed.is_set()
        release.set()
        await asyncio.to_thread(closed.wait)

    run(main())


def test_a_sub_agent_speaks_on_the_loop_that_samples() -> None:
    threads = set()

    class Sampler(ScriptedEngine):
        async def generate(self, *arguments: Any, **options: Any) -> Completion:
            threads.add(threading.current_thread())
            return await super().generate(*arguments, **options)

    class Asks(Plain):
        async def open(self, context: EpisodeContext) -> Observation:
            self.context = context
            return await super().open(context)

        async def step(self, reply: Reply) -> StepResult:
            helper = self.context.converse([{"role": "user", "content": "help"}], agent="helper")
            await helper.reply()
            assert helper.add_messages([{"role": "user", "content": "more"}])
            branch = helper.fork("other")
            await asyncio.gather(helper.reply(), branch.reply())
            assert (helper.turns, branch.turns, branch.agent) == (2, 2, "other")
            return StepResult()

    sampler = Sampler(lambda prompt, turn: [CHAT.end_of_turn_id])
    episode = run(play(Asks, sampler))
    assert episode.error is None
    assert threads == {threading.main_thread()}
    assert [(s.agent, s.sampled) for s in episode.segments] == [("", 1), ("helper", 2), ("other", 1)]


@pytest.mark.parametrize("timeout", [0, -1.0, "long", None])
def test_a_timeout_is_a_number_of_seconds(timeout: object) -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="timeout must be more than 0 seconds"):
            ThreadEnvironment(environment(lambda method: None, timeout=timeout))

    run(main())


def test_methods_need_not_be_async() -> None:
    class Blocks(Plain):
        def step(self, reply: Reply) -> StepResult:  # type: ignore[override]
            return StepResult(metrics={"plain": 1.0})

    async def main() -> Mapping[str, float]:
        made = await host(Blocks)  # type: ignore[arg-type]
        await made.open(EpisodeContext("t"))
        outcome = await made.step(None)  # type: ignore[arg-type]
        await made.close()
        return outcome.metrics

    assert run(main()) == {"plain": 1.0}
