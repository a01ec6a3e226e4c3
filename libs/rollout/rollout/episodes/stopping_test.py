"""A run that stops: its episodes are cancelled once, each environment closes to the end, and no task is left behind."""

import asyncio

import pytest

from rollout.chat.chat import Chat
from rollout.chat.messages import Reply
from rollout.engine import Sampling
from rollout.environments.environment import End, EpisodeContext, Observation, Score, StepResult
from rollout.environments.thread_environment import host
from rollout.episodes.runner import run_group
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.scripted import ScriptedEngine

TOKENIZER = tiny_tokenizer()
SIZE = 4


class Waiting:
    """Never answers a reply; `made` are all of its kind, in order."""

    made: list["Waiting"]

    def __init__(self) -> None:
        self.events: list[str] = []
        type(self).made.append(self)

    def __init_subclass__(cls) -> None:
        cls.made = []

    async def open(self, context: EpisodeContext) -> Observation:
        self.index = context.index
        self.events.append("open")
        return Observation(({"role": "user", "content": "37+58="},))

    async def step(self, reply: Reply) -> StepResult:
        self.events.append("step")
        await asyncio.sleep(3600)
        return StepResult(done=True)

    async def finish(self, end: End) -> Score:
        return Score(1.0)

    async def close(self) -> None:
        self.events.append("close")


def stop(kind: type[Waiting]) -> None:
    """Play a group until each of its environments was stepped, and cancel it."""
    reply = TOKENIZER("95<|im_end|>", add_special_tokens=False)["input_ids"]

    async def play() -> None:
        engine = ScriptedEngine(lambda prompt, turn: reply)
        job = asyncio.create_task(
            run_group(kind, engine, Chat(TOKENIZER), Sampling(max_new_tokens=20, seed=0), size=SIZE)
        )
        while sum("step" in e.events for e in kind.made) < SIZE:
            await asyncio.sleep(0.01)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(play())
    assert [e.events for e in kind.made] == [["open", "step", "close"]] * SIZE


def test_every_sibling_is_cancelled_and_closed() -> None:
    class Quick(Waiting):
        pass

    stop(Quick)


def test_one_that_has_closed_interrupts_no_other_that_still_does() -> None:
    class Slow(Waiting):
        async def close(self) -> None:
            await asyncio.sleep(0.1 * self.index)
            self.events.append("close")

    stop(Slow)


def test_whoever_stops_waiting_for_a_close_leaves_nothing_behind() -> None:
    class Slow(Waiting):
        async def close(self) -> None:
            self.events.append("close")
            await asyncio.sleep(0.3)

    async def play() -> None:
        environment = await host(Slow)
        closing = asyncio.create_task(environment.close())
        while not Slow.made[0].events:
            await asyncio.sleep(0.01)
        for _ in range(2):  # the second meets the wait for the thread's end
            closing.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(play())
