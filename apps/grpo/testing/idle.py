"""Tasks that teach nothing from a step on, for tests of whole runs."""

import functools
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from transformers import PreTrainedTokenizerBase

from apps.grpo.config import GrpoConfig
from apps.grpo.recipe import Recipe
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from apps.grpo.testing.recipe import AsciiEnvironment, AsciiTasks
from rollout import EnvironmentFactory, Reply, Score, StepResult, TaskRow
from rollout.environments.environment import End
from rollout.tools.workers import instant

Kind = Literal["same", "failed", "graded"]


class Same(AsciiEnvironment):
    """An environment of one turn whose reward is the same for every response."""

    async def step(self, reply: Reply) -> StepResult:
        """End the episode."""
        del reply
        return StepResult()

    async def finish(self, end: End) -> Score:
        """Return a constant."""
        del end
        return Score(0.5)


class Failed(AsciiEnvironment):
    """An environment that breaks."""

    async def step(self, reply: Reply) -> StepResult:
        """Raise."""
        del reply
        raise RuntimeError("the environment is broken")


class ScoredAscii(AsciiEnvironment):
    """An environment whose reward is far below 0."""

    async def finish(self, end: End) -> Score:
        """Return a negative number."""
        return Score((await super().finish(end)).reward - 20)


KINDS: dict[Kind, Any] = {"same": Same, "failed": Failed, "graded": ScoredAscii}


@dataclass(frozen=True)
class IdleTasks(AsciiTasks):
    """Tasks whose numbers from `first` on, below `last`, are of another kind."""

    held_out_metric: ClassVar[str | None] = None
    kind: Kind = field(kw_only=True)
    first: int = field(kw_only=True)
    last: int = field(kw_only=True, default=1 << 30)

    def environment(self, row: TaskRow) -> EnvironmentFactory:
        """Return the environment of the row's number."""
        number = row.data["number"]
        if not self.first <= number < self.last:
            return super().environment(row)
        return instant(functools.partial(KINDS[self.kind], number))


def idle_recipe(kind: Kind, steps: range | None) -> Recipe:
    """Return the recipe of these tests with training tasks of a kind in `steps`, from 1; None: in all tasks."""

    def make_tasks(config: GrpoConfig, tokenizer: PreTrainedTokenizerBase) -> IdleTasks:
        del tokenizer
        held_out, each = config.data.eval_prompts, config.prompts_per_step
        if steps is None:
            return IdleTasks(held_out, kind=kind, first=0)
        first, last = (held_out + (step - 1) * each for step in (steps.start, steps.stop))
        return IdleTasks(held_out, kind=kind, first=first, last=last)

    return replace(RECIPE, make_tasks=make_tasks)
