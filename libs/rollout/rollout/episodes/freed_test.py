"""An episode leaves nothing to Python's cycle collector: a step plays hundreds, and each pass walks all that is new."""

import asyncio
import gc
import weakref
from typing import Any

import pytest

from rollout.chat.chat import Chat
from rollout.chat.messages import Reply
from rollout.engine import Sampling
from rollout.environments.environment import End, EpisodeContext, Observation, Score, StepResult
from rollout.episodes.runner import run_group
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.scripted import ScriptedEngine

TOKENIZER = tiny_tokenizer()
ASK = {"role": "user", "content": "x"}


class Asking:
    """Asks once, and has a helper asked; or fails."""

    instant = True
    fails = False
    contexts: list[Any]

    async def open(self, context: EpisodeContext) -> Observation:
        self.contexts.append(weakref.ref(context))
        self.helper = context.converse([ASK], agent="helper")
        self.contexts.append(weakref.ref(self.helper))
        return Observation([ASK])

    async def step(self, reply: Reply) -> StepResult:
        await self.helper.reply()
        if self.fails:
            raise OSError("a machine is gone")
        return StepResult((), done=True)

    async def finish(self, end: End) -> Score:
        return Score(0.5)

    async def close(self) -> None:
        del self.helper


@pytest.mark.parametrize("fails", [False, True])
def test_contexts_and_conversations_are_freed_without_the_collector(fails: bool) -> None:
    seen: list[Any] = []
    kind = type("Kind", (Asking,), {"fails": fails, "contexts": seen})
    ids = [*TOKENIZER("ab", add_special_tokens=False)["input_ids"], 0]
    engine = ScriptedEngine(lambda prompt, turn: ids)
    gc.collect()
    gc.disable()
    try:
        played = asyncio.run(run_group(kind, engine, Chat(TOKENIZER), Sampling(max_new_tokens=8), size=4))
        left = [one for one in seen if one() is not None]
    finally:
        gc.enable()
    assert len(seen) == (16 if fails else 8)
    assert [episode.error is not None for episode in played] == [fails] * 4
    assert not left
