"""The quickstarts' synthetic tasks: sums, asked in one turn or with a calculator to call."""

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Literal

from apps.common.cli.flags import flag
from apps.common.data.answers import exact_reward
from apps.grpo.config import DataConfig, GrpoConfig, PluginConfig
from apps.grpo.tasks.prompt_tasks import Conversation
from apps.quickstart.arithmetic import Problem, distinct, problems
from apps.quickstart.demonstrations import demonstration
from rollout import Reply, Task, TaskRow, calculator
from rollout.seeds import derive_seed
from rollout.tools.tool import ToolResult
from rollout.tools.workers import instant

Kind = Literal["arithmetic", "calculator"]


@dataclass(frozen=True)
class SumTasks:
    """Sums of two numbers of `digits` digits; the held-out ones are the same for every seed, so that runs compare."""

    kind: Kind
    digits: int
    eval_prompts: int
    seed: int
    skipped: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The kind of the sums."""
        return self.kind

    def tasks(self, step: int, count: int) -> list[TaskRow]:
        """Return the step's sums, none of them held out."""
        return _rows(f"step-{step}", step_problems(self.digits, self.seed, step, count))

    def held_out(self) -> list[TaskRow]:
        """Return different sums that are never trained on."""
        return [*_held_out(self.digits, self.eval_prompts)]

    def environment(self, row: TaskRow) -> Task:
        """Return the task of one sum."""
        return as_task(row.data["problem"], self.kind)

    def cursor(self) -> dict[str, Any]:
        """Return nothing: a step's tasks follow from its number."""
        return {}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Do nothing: there is no state."""


@lru_cache
def _held_out(digits: int, count: int) -> tuple[TaskRow, ...]:
    stream = problems(random.Random(0), digits, held_out=True)
    return tuple(_row(problem) for problem in distinct(stream, count))


def _rows(name: str, chosen: Iterable[Problem]) -> list[TaskRow]:
    return [replace(_row(problem), draw=f"{name}/{i}") for i, problem in enumerate(chosen)]


def _row(problem: Problem) -> TaskRow:
    """Return the row of a sum; its id is the question, in any step of any run."""
    return TaskRow(problem.expression, {"problem": problem})


def sum_tasks(config: GrpoConfig, kind: Kind) -> SumTasks:
    """Return the tasks of a quickstart.

    Raises:
        ValueError: the configuration sets an option of prompt files, or asks for more sums than there are.
    """
    refuse_file_options(config, ("digits", "eval_prompts"))
    if kind == "arithmetic" and config.max_turns != 1:
        raise ValueError("--max-turns has no effect where no tool can be called: leave it at 1")
    tasks = SumTasks(kind, config.data.digits, config.data.eval_prompts, config.seed)
    tasks.held_out()  # raises where --digits has fewer held-out sums than --eval-prompts
    return tasks


def refuse_file_options(config: GrpoConfig, own: Sequence[str]) -> None:
    """Raise ValueError where a recipe that makes its tasks has an option of prompt files; `own` are its options."""
    for option in fields(DataConfig):
        if option.name not in own and getattr(config.data, option.name) != option.default:
            raise ValueError(
                f"recipe {config.recipe!r} makes its own tasks: --{option.name.replace('_', '-')} goes with "
                "--recipe math --model DIR --data FILE"
            )
    for name in (item.name for item in fields(PluginConfig)):
        if getattr(config.plugins, name) != getattr(PluginConfig, name):
            raise ValueError(
                f"recipe {config.recipe!r} makes its own tasks: {flag(f'plugins.{name}')} goes with --environment "
                "FILE.py:NAME, or with --model DIR --data FILE"
            )


def step_problems(digits: int, seed: int, step: int, count: int) -> list[Problem]:
    """Return the training problems of a step, a function of seed and step alone."""
    stream = problems(random.Random(derive_seed(seed, "problems", step)), digits)
    return list(itertools.islice(stream, count))


def demonstrations(config: GrpoConfig, step: int, kind: Kind) -> list[Conversation]:
    """Return the demonstrations of step `step` of a warm start: other sums than those of the GRPO steps."""
    chosen = step_problems(config.data.digits, config.seed + 1, step, config.warm_start.batch_size)
    tools = (calculator().schema,) if kind == "calculator" else ()
    return [Conversation(demonstration(problem, kind), tools) for problem in chosen]


def as_task(problem: Problem, kind: Kind) -> Task:
    """Return a problem as a task; with the calculator, an answer counts only after a call."""

    @instant
    def reward(reply: Reply, results: Sequence[ToolResult]) -> float:
        allowed = kind != "calculator" or any(result.ok for result in results)
        return exact_reward(reply.content, problem.answer) if allowed else 0.0

    tools = (calculator(),) if kind == "calculator" else ()
    return Task(messages=({"role": "user", "content": problem.question},), reward=reward, tools=tools)
