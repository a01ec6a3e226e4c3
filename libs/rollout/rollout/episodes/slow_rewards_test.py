"""Rewards that take their time: side by side, beside sampling, and no longer than they may."""

import asyncio
import threading
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from rollout.chat.chat import Chat
from rollout.chat.messages import Reply
from rollout.engine import Sampling
from rollout.environments.environment import Score
from rollout.environments.task import Task
from rollout.episodes.episode import Episode
from rollout.episodes.runner import run_group
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.scripted import ScriptedEngine

TOKENIZER = tiny_tokenizer()
QUESTION = ({"role": "user", "content": "37+58="},)


def group(task: Task, size: int) -> Coroutine[Any, Any, list[Episode]]:
    engine = ScriptedEngine(lambda prompt, turn: TOKENIZER("95<|im_end|>", add_special_tokens=False)["input_ids"])
    return run_group(task, engine, Chat(TOKENIZER), Sampling(max_new_tokens=20, seed=0), size=size)


class Meeting:
    """Rewards that end only when `size` of them are under way at once and the event loop that samples has seen it."""

    def __init__(self, size: int) -> None:
        self.size, self.inside, self.opened = size, 0, False
        self.lock, self.released = threading.Lock(), threading.Event()

    def come(self) -> None:
        with self.lock:
            self.inside += 1

    async def open(self) -> None:
        """Runs on the loop that samples: a reward that holds it up is never let go."""
        while self.inside < self.size:
            await asyncio.sleep(0.005)
        self.opened = True
        self.released.set()

    def wait(self) -> float:
        if not self.released.wait(20.0):
            self.released.set()  # the others need not wait as long
        return float(self.opened)

    def block(self, reply: Reply, results: object) -> float:
        self.come()
        return self.wait()

    async def wait_async(self, reply: Reply, results: object) -> Score:
        self.come()
        until = time.monotonic() + 20.0
        while not self.released.is_set() and time.monotonic() < until:
            await asyncio.sleep(0.005)
        self.released.set()
        return Score(float(self.opened), {"judge": 1.0})

    async def block_in_async(self, reply: Reply, results: object) -> float:
        self.come()
        return self.wait()


@pytest.mark.parametrize("kind", ["block", "wait_async", "block_in_async"])
def test_slow_rewards_run_side_by_side_and_stall_nobody(kind: str) -> None:
    meeting = Meeting(12)

    async def play() -> list[Episode]:
        opening = asyncio.create_task(meeting.open())
        task = Task(QUESTION, getattr(meeting, kind))
        episodes = await group(task, 12)
        opening.cancel()
        return episodes

    assert [e.reward for e in asyncio.run(play())] == [1.0] * 12


def test_a_reward_that_hangs_fails_its_episode_and_is_tried_again() -> None:
    def hang(reply: Reply, results: object) -> float:
        time.sleep(0.4)
        return 1.0

    (episode,) = asyncio.run(group(Task(QUESTION, hang, reward_timeout=0.05), 1))
    assert episode.attempt == 1
    assert "gave no answer within 0.05 s" in (episode.error or "")
