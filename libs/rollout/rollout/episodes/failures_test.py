"""What breaks in an environment or a reward: one episode fails, by name; siblings go on, and everything is closed."""

import asyncio
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

import pytest

from rollout.chat.chat import Chat
from rollout.chat.messages import Reply
from rollout.engine import Completion, RolloutEngine, Sampling
from rollout.environments.environment import End, EnvironmentFactory, EpisodeContext, Observation, Score, StepResult
from rollout.environments.sources import TaskRow
from rollout.environments.task import Task
from rollout.episodes.episode import Episode, failures
from rollout.episodes.runner import run_episode, run_group
from rollout.errors import EpisodeFailed
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.scripted import ScriptedEngine
from rollout.tools.arithmetic import calculator

TOKENIZER = tiny_tokenizer()
QUESTION = ({"role": "user", "content": "37+58="},)
SAMPLING = Sampling(max_new_tokens=20, seed=0)


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def engine_of(*turns: str) -> ScriptedEngine:
    return ScriptedEngine(lambda prompt, turn: encode(turns[turn % len(turns)]))


def answering() -> ScriptedEngine:
    return engine_of("95<|im_end|>")


class Plain:
    """An environment that does nothing much; `made` are all of its kind, in order."""

    made: list["Plain"]

    def __init__(self) -> None:
        self.events: list[str] = []
        type(self).made.append(self)

    def __init_subclass__(cls) -> None:
        cls.made = []

    async def open(self, context: EpisodeContext) -> Observation:
        self.context = context
        self.events.append("open")
        return Observation(QUESTION)

    async def step(self, reply: Reply) -> StepResult:
        self.events.append("step")
        return StepResult(({"role": "user", "content": "more"},), done=reply.content == "95")

    async def finish(self, end: End) -> Score:
        self.events.append(end)
        return Score(1.0)

    async def close(self) -> None:
        self.events.append("close")


def group(factory: EnvironmentFactory, engine: RolloutEngine | None = None, **options: Any) -> list[Episode]:
    return asyncio.run(run_group(factory, engine or answering(), Chat(TOKENIZER), SAMPLING, **{"size": 3, **options}))


def once(**options: Any) -> Callable[..., Episode]:
    def episode(factory: EnvironmentFactory, engine: RolloutEngine | None = None) -> Episode:
        return asyncio.run(run_episode(factory, engine or answering(), Chat(TOKENIZER), SAMPLING, **options))

    return episode


@pytest.mark.parametrize("where", ["made", "open", "step", "finish", "close"])
@pytest.mark.parametrize("retryable", [True, False])
def test_what_an_environment_raises_fails_its_episode_alone(where: str, retryable: bool) -> None:
    """The second of the group breaks, in both attempts where there are two; the others are scored."""

    numbers = itertools.count()

    class Breaking(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.number = next(numbers)  # of the making: in threads, whoever comes first
            self.break_at("made")

        def break_at(self, place: str) -> None:
            if place == where and (self.number if place == "made" else self.context.index) == 1:
                raise EpisodeFailed("the machine is gone", retryable=retryable)

        async def open(self, context: EpisodeContext) -> Observation:
            self.context = context
            self.break_at("open")
            return await super().open(context)

        async def step(self, reply: Reply) -> StepResult:
            self.break_at("step")
            return await super().step(reply)

        async def finish(self, end: End) -> Score:
            self.break_at("finish")
            return await super().finish(end)

        async def close(self) -> None:
            await super().close()
            self.break_at("close")

    episodes = group(Breaking)
    again = retryable and where == "made"  # the second factory call in all is made once
    broken = next(e for e in episodes if e.error or e.attempt) if where == "made" else episodes[1]
    assert [e.score for e in episodes if e is not broken] == [Score(1.0)] * 2
    assert broken.score == (Score(1.0) if again else None)
    if not again:
        assert (broken.end, broken.error) == ("failed", "the machine is gone")
        assert failures(episodes) == {"the machine is gone": 1}
    assert broken.attempt == (1 if retryable else 0)
    assert [e.attempt for e in episodes if e is not broken] == [0, 0]
    opened = [e for e in Breaking.made if e.events]
    assert all(e.events.count("close") == 1 for e in opened)


@pytest.mark.parametrize("where", ["made", "open", "step", "finish", "close"])
@pytest.mark.parametrize("error", [ConnectionResetError, TimeoutError, OSError, RuntimeError, KeyError])
@pytest.mark.parametrize("lasting", [False, True])
def test_a_crash_is_tried_again_then_reported(where: str, error: type[Exception], lasting: bool) -> None:
    broken: list[str] = []

    class Flaky(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.fail("made")

        def fail(self, place: str) -> None:
            if place == where and (lasting or not broken):
                broken.append(place)
                raise error("gone")

        async def open(self, context: EpisodeContext) -> Observation:
            self.fail("open")
            return await super().open(context)

        async def step(self, reply: Reply) -> StepResult:
            self.fail("step")
            return await super().step(reply)

        async def finish(self, end: End) -> Score:
            self.fail("finish")
            return await super().finish(end)

        async def close(self) -> None:
            await super().close()
            self.fail("close")

    (episode,) = group(Flaky, size=1)
    assert (episode.attempt, episode.score) == (1, None if lasting else Score(1.0))
    assert len(broken) == (2 if lasting else 1)
    assert not lasting or f"raised {error.__name__}" in (episode.error or "")


def test_a_connection_that_stays_broken_is_reported_after_the_last_attempt() -> None:
    def reward(reply: Reply, results: object) -> Never:
        raise ConnectionRefusedError("the judge is down")

    episodes = group(Task(QUESTION, reward), attempts=3)
    assert [e.attempt for e in episodes] == [2] * 3
    assert failures(episodes) == {"finish() raised ConnectionRefusedError: the judge is down": 3}


def test_an_attempt_keeps_the_seed_and_counts_up() -> None:
    class Lost(Plain):
        async def finish(self, end: End) -> Score:
            if self.context.attempt == 0:
                raise EpisodeFailed("lost", retryable=True)
            return await super().finish(end)

    engine = answering()
    episodes = group(Lost, engine, row=TaskRow("sum-7", {"a": 3}), size=2)
    assert [e.id for e in episodes] == ["sum-7/0/1", "sum-7/1/1"]
    contexts = [e.context for e in Lost.made]
    assert {(c.task_id, c.data["a"]) for c in contexts} == {("sum-7", 3)}
    seeds = {(c.index, c.attempt): c.seed for c in contexts}
    assert seeds[0, 0] == seeds[0, 1] != seeds[1, 0] == seeds[1, 1]
    asked = [s.seed for s in engine.samplings]
    assert sorted(Counter(asked).values()) == [2, 2]


@pytest.mark.parametrize(
    ("reward", "reason"),
    [
        (lambda reply, results: "0.5", "gave the text '0.5': give a number or a Score"),
        (lambda reply, results: math.nan, "finish() raised ValueError: reward is nan"),
        (lambda reply, results: -math.inf, "reward is -inf"),
        (lambda reply, results: 1e39, "reward is 1e+39: a score is made of finite numbers, as float32 holds them"),
        (lambda reply, results: Score(1.0, {"style": math.nan}), "reward component 'style' is nan"),
        (lambda reply, results: "good", "gave the text 'good': give a number or a Score"),
        (lambda reply, results: None, "TypeError"),
        (lambda reply, results: 1 / 0, "ZeroDivisionError"),
        (lambda reply, results: exit(3), "SystemExit"),
    ],
)
def test_a_reward_that_is_no_number_fails_the_episode_by_name(reward: Callable[..., Any], reason: str) -> None:
    broken = {"count": 0}

    def second_breaks(reply: Reply, results: object) -> Any:
        broken["count"] += 1
        return reward(reply, results) if broken["count"] == 2 else 0.5

    episodes = group(Task(QUESTION, second_breaks), attempts=1)
    failed = [e for e in episodes if e.error]
    assert len(failed) == 1
    assert reason in (failed[0].error or "")
    assert failed[0].sampled == 3  # what was sampled is kept for people
    assert [e.reward for e in episodes if not e.error] == [0.5, 0.5]


CALL = (
    "<tool_call>\n<function=calculator>\n<parameter=expression>\n1+1\n</parameter>\n</function>\n</tool_call><|im_end|>"
)
LIMITS: dict[str, tuple[dict[str, Any], str]] = {
    "done": ({}, "95<|im_end|>"),
    "length": ({}, "no end"),
    "max_turns": ({"max_turns": 2}, "no<|im_end|>"),
    "max_tokens": ({"max_tokens": 70}, "no<|im_end|>"),
    "deadline": ({"deadline": 0.0}, "no<|im_end|>"),
}


@pytest.mark.parametrize("end", LIMITS)
def test_every_end_reaches_finish(end: str) -> None:
    options, turn = LIMITS[end]

    class Watching(Plain):
        pass

    episode = once(**options)(Watching, engine_of(turn * 12 if end == "length" else turn))
    (environment,) = Watching.made
    assert (episode.end, environment.events[-2:]) == (end, [end, "close"])
    assert episode.score == Score(1.0)
    if end == "max_tokens":
        assert len(episode.segments[0].ids) < 70


@pytest.mark.parametrize("end", LIMITS)
@pytest.mark.parametrize("cut_off", [0.0, -1.0, None])
def test_a_tasks_reward_for_a_limit(end: str, cut_off: float | None) -> None:
    """Where turns or tokens run out, each turn calls a tool, which asks for another turn."""
    options, turn = LIMITS[end]
    task = Task(QUESTION, lambda reply, results: 0.25, tools=(calculator(),), cut_off_reward=cut_off)
    if end == "max_tokens":
        options = {"max_tokens": len(Chat(TOKENIZER).open(QUESTION, task.tools)) + 200}
    turn = {"length": "no end" * 12, "max_turns": CALL, "max_tokens": CALL}.get(end, turn)
    sampling = Sampling(max_new_tokens=len(encode(CALL)) if end in ("max_turns", "max_tokens") else 20, seed=0)
    episode = asyncio.run(run_episode(task, engine_of(turn), Chat(TOKENIZER), sampling, **options))
    assert episode.end == end
    assert episode.reward == (0.25 if end == "done" or cut_off is None else cut_off)


def test_an_environment_that_takes_too_long_meets_the_deadline() -> None:
    class Sleeping(Plain):
        async def step(self, reply: Reply) -> StepResult:
            await asyncio.sleep(3600)
            raise AssertionError("nobody waits as long")

    episode = once(deadline=time.monotonic() + 0.2)(Sleeping)
    assert (episode.end, episode.score) == ("deadline", Score(1.0))
    assert Sleeping.made[0].events == ["open", "deadline", "close"]


def test_an_opening_that_cannot_be_asked_fails_by_its_reason() -> None:
    class ImageProcessor(Plain):
        async def open(self, context: EpisodeContext) -> Observation:
            return Observation(({"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "1+1="}]},))

    assert "holds media ('image')" in (once()(ImageProcessor).error or "")
    assert ImageProcessor.made[0].events == ["close"]

    class Endless(Plain):
        async def step(self, reply: Reply) -> StepResult:
            return StepResult(({"role": "user", "content": [{"type": "image"}]},), done=False)

    assert "holds media" in (once()(Endless).error or "")


def test_an_engine_that_fails_stops_the_group_and_closes_it() -> None:
    class Dead(ScriptedEngine):
        async def generate(
            self, prompt_ids: Sequence[int], sampling: Sampling, media: Mapping[str, Any] | None = None, **options: Any
        ) -> Completion:
            if len(self.prompts) == 2:
                raise ValueError("the model's logits are not finite")
            self.prompts.append(list(prompt_ids))
            await asyncio.sleep(3600)
            raise AssertionError("nobody waits as long")

    class Watching(Plain):
        pass

    with pytest.raises(ValueError, match="not finite"):
        group(Watching, Dead(lambda prompt, turn: []))
    assert [e.events for e in Watching.made] == [["open", "close"]] * 3


def test_a_close_that_fails_does_not_hide_why_the_run_stopped() -> None:
    class Bad(Plain):
        async def close(self) -> Never:
            raise RuntimeError("cannot close")

    class Dead(ScriptedEngine):
        async def generate(
            self, prompt_ids: Sequence[int], sampling: Sampling, media: Mapping[str, Any] | None = None, **options: Any
        ) -> Never:
            raise ValueError("the model's logits are not finite")

    with pytest.raises(ValueError, match="not finite"):
        group(Bad, Dead(lambda prompt, turn: []))
    assert "close() raised RuntimeError: cannot close" in (once()(Bad).error or "")


class Ranked(Plain):
    """Scored by rank within the group, whatever `finish` says."""

    @staticmethod
    def score_group(episodes: Sequence[Episode]) -> list[Score]:
        return [Score(float(rank), {"own": e.reward}) for rank, e in enumerate(episodes)]


def test_scores_relative_to_the_group_take_the_place_of_each_ones_own() -> None:
    assert [e.score for e in group(Ranked)] == [Score(float(i), {"own": 1.0}) for i in range(3)]

    class Awaited(Plain):
        @staticmethod
        async def score_group(episodes: Sequence[Episode]) -> list[Score]:
            await asyncio.sleep(0)
            return [Score(2.0)] * len(episodes)

    assert [e.reward for e in group(Awaited)] == [2.0] * 3


@pytest.mark.parametrize(
    ("scores", "reason"),
    [
        (lambda episodes: [Score(1.0)], "gave 1 scores for 3 episodes"),
        (lambda episodes: [1.0, 2.0, 3.0], "gives one Score each"),
        (lambda episodes: 1 / 0, "score_group raised ZeroDivisionError"),
    ],
)
def test_group_scores_that_cannot_be_had_fail_the_group(scores: Callable[..., Any], reason: str) -> None:
    class Wrong(Plain):
        score_group = staticmethod(scores)

    episodes = group(Wrong)
    assert all(reason in (e.error or "") and e.score is None for e in episodes)
