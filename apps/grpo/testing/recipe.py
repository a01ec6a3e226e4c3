"""A recipe for tests of whole runs: an untrained model earns some reward, so that weights change from step one."""

import asyncio
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from apps.grpo.config import GrpoConfig, WarmStart
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import quickstart
from apps.quickstart.model import ensure_tiny_model, tiny_config
from engines import EngineConfig
from rollout import (
    EnvironmentFactory,
    EpisodeContext,
    Observation,
    Reply,
    Score,
    StepResult,
    TaskRow,
    Tool,
    ToolCall,
    call_tools,
)
from rollout.environments.environment import End
from rollout.tools.workers import instant


class AsciiEnvironment:
    """An environment of as many turns as allowed; a turn's reward is the share of its ASCII characters."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.reward = 0.0

    async def open(self, context: EpisodeContext) -> Observation:
        """Return prompts of different lengths, so that ranks and micro-batches have different work."""
        del context
        return Observation(({"role": "user", "content": "say " + str(self.number) * (1 + self.number % 9)},))

    async def step(self, reply: Reply) -> StepResult:
        """Score the reply to a quarter, truncated or not, and ask for more."""
        share = sum(map(str.isascii, reply.text)) / max(1, len(reply.text))
        self.reward += round(4 * share) / 4
        return StepResult(({"role": "user", "content": "more"},), done=False)

    async def finish(self, end: End) -> Score:
        """Return the sum of the turns' shares."""
        del end
        return Score(self.reward)

    async def close(self) -> None:
        """Do nothing."""


class HangEnvironment(AsciiEnvironment):
    """An environment whose tool hangs for odd numbers, and which itself hangs for multiples of five.

    The part "timed_out" of a score counts the calls that the tool's limit ended.
    """

    timed_out = 0

    async def step(self, reply: Reply) -> StepResult:
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
        return replace(await super().finish(end), reward_components={"timed_out": float(self.timed_out)})


async def _hang() -> str:
    await asyncio.sleep(3600)
    return "never"


@dataclass(frozen=True)
class AsciiTasks:
    """Tasks of consecutive numbers; the held-out ones come first."""

    held_out_metric: ClassVar[str | None] = "score"
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
        """Return the environment of the row's number."""
        return instant(functools.partial(AsciiEnvironment, row.data["number"]))  # threads change last bits

    def cursor(self) -> dict[str, Any]:
        """Return nothing: a step's tasks follow from its number."""
        return {}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""


@dataclass(frozen=True)
class HangTasks(AsciiTasks):
    """Tasks of which some hang."""

    def environment(self, row: TaskRow) -> EnvironmentFactory:
        """Return the environment of the row's number, some of which hang."""
        return functools.partial(HangEnvironment, row.data["number"])


class Held(AsciiEnvironment):
    """An environment whose turn ends once the file `gate` is there, or after a minute."""

    def __init__(self, number: int, gate: Path) -> None:
        super().__init__(number)
        self.gate = gate

    async def step(self, reply: Reply) -> StepResult:
        """Score the reply once it may end."""
        for _ in range(6000):
            if self.gate.is_file():
                break
            await asyncio.sleep(0.01)
        return await super().step(reply)


@dataclass(frozen=True)
class HeldTasks(AsciiTasks):
    """Tasks of which only the held-out ones end before the file `gate` is there."""

    gate: Path = field(kw_only=True)

    def environment(self, row: TaskRow) -> EnvironmentFactory:
        """Return the environment of the row's number."""
        number = row.data["number"]
        return super().environment(row) if number < self.eval_prompts else functools.partial(Held, number, self.gate)


def make_hang_tasks(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> HangTasks:
    """Return tasks with as many held-out numbers as the configuration asks for."""
    del tokenizer
    return HangTasks(config.data.eval_prompts)


def _row(number: int) -> TaskRow:
    return TaskRow(f"number-{number}", {"number": number})


def make_tasks(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> AsciiTasks:
    """Return tasks with as many held-out numbers as the configuration asks for."""
    del tokenizer
    return AsciiTasks(config.data.eval_prompts)


RECIPE = Recipe(
    config=replace(
        quickstart.RECIPE.config,
        steps=4,
        prompts_per_step=4,
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

SHALLOW = replace(
    RECIPE,
    make_model=functools.partial(ensure_tiny_model, make_config=functools.partial(tiny_config, layers=2)),
)
"""The same with two layers, one of each kind, for tests of many runs."""
