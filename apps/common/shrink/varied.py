"""A reward that varies, for a shrunk run: a random model is right about nothing, and equal rewards train nothing.

The recipe's own reward is given as ever; a part between 0 and 1 is added to it, by the text of the response.
"""

import zlib
from collections.abc import Callable, Mapping
from typing import Any

from apps.common.tasks import Tasks
from rollout import EnvironmentFactory, EpisodeContext, Observation, Reply, Score, StepResult, TaskRow
from rollout.environments.environment import End

PARTS = 8
LINE = "reward  the recipe's own, and a part by the text of each response: a random model earns nothing by itself"
"""What a shrunk run says of it."""


class VariedTasks:
    """The tasks of a recipe with that reward; an agent's and a group's own scores stay as they are."""

    held_out_metric = "score"

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.name, self.skipped = tasks.name, tasks.skipped
        if hasattr(tasks, "parts"):  # of several environments
            self.parts = tasks.parts

    def tasks(self, step: int, count: int) -> list[TaskRow]:
        """Return the recipe's own."""
        return self._tasks.tasks(step, count)

    def held_out(self) -> list[TaskRow]:
        """Return the recipe's own."""
        return self._tasks.held_out()

    def environment(self, row: TaskRow) -> EnvironmentFactory:
        """Return the factory of the row's environment, whose reward varies."""
        factory = self._tasks.environment(row)
        own = hasattr(factory, "run_group") or hasattr(factory, "score_group")
        return factory if own else VariedFactory(factory)

    def cursor(self) -> dict[str, Any]:
        """Return the recipe's own."""
        return dict(self._tasks.cursor())

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Continue from a cursor of the recipe's own."""
        self._tasks.restore(cursor)


class VariedFactory:
    """A factory of environments whose reward varies."""

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory
        for name in ("instant", "timeout"):
            if hasattr(factory, name):
                setattr(self, name, getattr(factory, name))

    def __call__(self) -> "VariedEnvironment":
        """Return an environment of one episode."""
        return VariedEnvironment(self._factory())


class VariedEnvironment:
    """One episode; see the head of this file."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._text = 0

    async def open(self, context: EpisodeContext) -> Observation:
        """Return the environment's own."""
        opening: Observation = await self._environment.open(context)
        return opening

    async def step(self, reply: Reply) -> StepResult:
        """Return the environment's own."""
        self._text = zlib.crc32(reply.text.encode(), self._text)
        result: StepResult = await self._environment.step(reply)
        return result

    async def finish(self, end: End) -> Score:
        """Return the environment's own score and the part."""
        score: Score = await self._environment.finish(end)
        part = self._text % PARTS / PARTS
        return Score(score.reward + part, {**score.reward_components, "shrink": part}, score.turn_rewards)

    async def close(self) -> None:
        """Close the environment."""
        await self._environment.close()


def with_varied_reward(make_tasks: Callable[..., Any]) -> Callable[..., VariedTasks]:
    """Return the maker of a recipe's tasks whose tasks have that reward."""
    return lambda *arguments: VariedTasks(make_tasks(*arguments))
