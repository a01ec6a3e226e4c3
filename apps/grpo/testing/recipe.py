"""A recipe for tests of whole runs: an untrained model earns some of its reward, so that weights move from step one."""

import asyncio
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from apps.grpo.config import GrpoConfig, WarmStart
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import quickstart
from apps.quickstart.model import ensure_tiny_model
from engines import EngineConfig
from rollout import (
    EnvironmentFactory,
    EpisodeContext,
    Opening,
    Outcome,
    Reply,
    Score,
    TaskRow,
    Tool,
    ToolCall,
    call_tools,
)
from rollout.environments.environment import End
from rollout.tools.workers import instant


class Babble:
    """Talk about a number, as many turns as there may be; a turn earns the share of its characters that are ASCII."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reward = 0.0

    async def open(self, context: EpisodeContext) -> Opening:
        """Return prompts of different lengths, so that ranks and micro-batches have different work."""
        del context
        return Opening(({"role": "user", "content": "say " + str(self.number) * (1 + self.number % 9)},))

    async def step(self, reply: Reply) -> Outcome:
        """Score the reply to a quarter, cut off or not, and ask for more."""
        share = sum(map(str.isascii, reply.text)) / max(1, len(reply.text))
        self.reward += round(4 * share) / 4
        return Outcome(({"role": "user", "content": "more"},), done=False)

    async def finish(self, end: End) -> Score:
        """Return the sum of the turns' shares."""
        del end
        return Score(self.reward)

    async def close(self) -> None:
        """Nothing is held."""


class Troubled(Babble):
    """A tool hangs in every odd number's episodes, and the environment itself in those of multiples of five.

    The part "timed_out" of a score counts the calls that the tool's limit ended.
    """

    timed_out = 0

    async def step(self, reply: Reply) -> Outcome:
        """Score the reply, unless it hangs."""
        outcome = await super().step(reply)
        if self.number % 5 == 0:
            await asyncio.sleep(3600)
        if self.number % 2:
            tool = Tool("wait", "Waits.", {"type": "object", "properties": {}}, _hang, timeout=0.2)
            (result,) = await call_tools([tool], [ToolCall("wait", "{}")])
            self.timed_out += result.timed_out
        return outcome

    async def finish(self, end: End) -> Score:
        """Return the sum of the turns' shares, and what timed out."""
        return replace(await super().finish(end), parts={"timed_out": float(self.timed_out)})


async def _hang() -> str:
    await asyncio.sleep(3600)
    return "never"


@dataclass(frozen=True)
class BabbleTasks:
    """Numbers to talk about: step by step upwards, the held-out ones below all."""

    eval_prompts: int
    name: str = "babble"
    skipped: Mapping[str, int] = field(default_factory=dict)

    def tasks(self, step: int, count: int) -> list[TaskRow]:
        """Return the next numbers."""
        return [_row(self.eval_prompts + step * count + i) for i in range(count)]

    def held_out(self) -> list[TaskRow]:
        """Return the first numbers."""
        return [_row(i) for i in range(self.eval_prompts)]

    def environment(self, row: TaskRow) -> EnvironmentFactory:
        """Return to talk about the row's number."""
        return instant(functools.partial(Babble, row.data["number"]))  # with a thread's timing, last bits would differ

    def cursor(self) -> dict[str, Any]:
        """Return nothing: what a step asks follows from its number."""
        return {}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Nothing to go on from."""


@dataclass(frozen=True)
class TroubledTasks(BabbleTasks):
    """Numbers whose episodes hang here and there."""

    def environment(self, row: TaskRow) -> EnvironmentFactory:
        """Return to talk about the row's number, with trouble."""
        return functools.partial(Troubled, row.data["number"])


class Held(Babble):
    """A turn stays open until the file `gate` is there, or a minute is over."""

    def __init__(self, number: int, gate: Path) -> None:
        super().__init__(number)
        self.gate = gate

    async def step(self, reply: Reply) -> Outcome:
        """Score the reply once it may end."""
        for _ in range(6000):
            if self.gate.is_file():
                break
            await asyncio.sleep(0.01)
        return await super().step(reply)


@dataclass(frozen=True)
class HeldTasks(BabbleTasks):
    """Numbers to talk about, of which only the held-out ones end before the file `gate` is there."""

    gate: Path = field(kw_only=True)

    def environment(self, row: TaskRow) -> EnvironmentFactory:
        """Return to talk about the row's number."""
        number = row.data["number"]
        return super().environment(row) if number < self.eval_prompts else functools.partial(Held, number, self.gate)


def make_troubled_tasks(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> TroubledTasks:
    """As many held-out numbers as asked for."""
    del tokenizer
    return TroubledTasks(config.data.eval_prompts)


def _row(number: int) -> TaskRow:
    return TaskRow(f"number-{number}", {"number": number})


def make_tasks(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> BabbleTasks:
    """As many held-out numbers as asked for."""
    del tokenizer
    return BabbleTasks(config.data.eval_prompts)


RECIPE = Recipe(
    config=replace(
        quickstart.RECIPE.config,
        steps=4,
        prompts=4,
        group_size=4,
        eval_every=2,
        save_every=2,
        data=replace(quickstart.RECIPE.config.data, eval_prompts=8),
        warm_start=WarmStart(steps=0),
        engine=EngineConfig(device="cpu", lr=3e-3),
    ),
    make_tasks=make_tasks,
    make_model=ensure_tiny_model,
    demonstrations=quickstart.RECIPE.demonstrations,
)
