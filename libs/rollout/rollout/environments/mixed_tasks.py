"""Tasks of several environments: how many of each a step asks.

A step's prompts are dealt among the environments by their shares, so that after every step each has had its share of
all prompts so far, to within one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout.environments.sources import TaskRow, TaskSource


class NumberedTasks:
    """Numbered tasks without data, a `TaskSource`: the first `count` are held out, the others follow in order."""

    def __init__(self, name: str, count: int) -> None:
        self.name = name
        self._count = count
        self._step, self._start, self._end = -1, 0, 0

    def tasks(self, step: int, count: int) -> list[TaskRow]:
        """Return the next `count` tasks; raise ValueError for a step before the last one asked for."""
        if step < self._step:
            raise ValueError(f"the tasks of {self.name!r} are at step {self._step}: step {step} is over")
        if step > self._step:
            self._step, self._start = step, self._end
        self._end = self._start + count
        return [self._row(self._count + n) for n in range(self._start, self._end)]

    def held_out(self) -> list[TaskRow]:
        """Return the first `count` tasks."""
        return [self._row(n) for n in range(self._count)]

    def cursor(self) -> dict[str, Any]:
        """Return the position."""
        return {"name": self.name, "step": self._step, "start": self._start, "end": self._end}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Continue from a cursor."""
        self._step, self._start, self._end = (int(cursor[key]) for key in ("step", "start", "end"))

    def _row(self, number: int) -> TaskRow:
        return TaskRow(f"{self.name}-{number}", {"number": number})


@dataclass(frozen=True)
class HeldOutTasks:
    """Tasks that are evaluated and never trained, a `TaskSource`."""

    name: str
    rows: tuple[TaskRow, ...]

    def tasks(self, step: int, count: int) -> list[TaskRow]:
        """Return nothing; raise ValueError where a task is asked for."""
        if count:
            raise ValueError(f"the tasks of {self.name!r} are held out: none trains at step {step}")
        return []

    def held_out(self) -> list[TaskRow]:
        """Return all tasks."""
        return list(self.rows)

    def cursor(self) -> dict[str, Any]:
        """Return no position."""
        return {}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Continue, from wherever it was."""


@dataclass(frozen=True)
class EnvironmentPart:
    """One environment of a run: its name in tables, its spec, its tasks, its share of the prompts (0: none trains)."""

    name: str
    spec: str
    source: TaskSource
    share: float


class EnvironmentTasks:
    """Tasks of several environments, a `TaskSource`; `load` returns the factory that a spec names."""

    name = "own"

    def __init__(
        self,
        parts: Sequence[EnvironmentPart],
        load: Callable[[str], Any],
        wrap: Callable[[Any], Any] | None = None,
    ) -> None:
        self.parts = tuple(parts)
        self._load = load
        self.skipped: Mapping[str, int] = {}
        self._wrap = wrap
        self._dealt = [0] * len(parts)
        self._before = [0] * len(parts)
        self._step = -1

    def tasks(self, step: int, count: int) -> list[TaskRow]:
        """Return the step's tasks, environment by environment."""
        if step != self._step:
            self._step, self._before = step, self._dealt
        counts = prompts_per_environment(count, [part.share for part in self.parts], self._before)
        self._dealt = [before + more for before, more in zip(self._before, counts, strict=True)]
        return [
            row
            for part, number in zip(self.parts, counts, strict=True)
            for row in (_of(part, task) for task in part.source.tasks(step, number))
        ]

    def held_out(self) -> list[TaskRow]:
        """Return every environment's held-out tasks."""
        return [_of(part, row) for part in self.parts for row in part.source.held_out()]

    def cursor(self) -> dict[str, Any]:
        """Return the number of prompts of each environment so far, and the cursor of each source."""
        sources = {part.spec: part.source.cursor() for part in self.parts}
        return {"step": self._step, "before": self._before, "dealt": self._dealt, "sources": sources}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Continue from a cursor; raise ValueError for one of other environments or rows."""
        if list(cursor["sources"]) != [part.spec for part in self.parts]:
            raise ValueError(f"the run was begun with other environments: {', '.join(cursor['sources'])}")
        self._step, self._before, self._dealt = cursor["step"], list(cursor["before"]), list(cursor["dealt"])
        for part in self.parts:
            part.source.restore(cursor["sources"][part.spec])

    def environment(self, row: TaskRow) -> Callable[[], Any]:
        """Return the factory of the row's environment."""
        spec = next(part.spec for part in self.parts if row.environment == part.name)
        factory: Callable[[], Any] = self._load(spec)
        return factory if self._wrap is None else self._wrap(factory)

    @property
    def held_out_metric(self) -> str | None:
        """What the mean reward is called, by the attribute `held_out_metric` of the factories: "score" where one says
        so, else what all say; None where some say nothing."""
        declared = {getattr(self._load(part.spec), "held_out_metric", None) for part in self.parts}
        return "score" if "score" in declared else declared.pop() if len(declared) == 1 else None

    def environment_of(self, row: TaskRow) -> str:
        """Return the name of the row's environment."""
        return row.environment


def prompts_per_environment(count: int, shares: Sequence[float], before: Sequence[int]) -> list[int]:
    """Return how many of `count` prompts each environment gets.

    With those of `before` each has its share, to within one: the next prompt goes to the one that lacks most.
    """
    dealt = list(before)
    for _ in range(count):
        total = sum(dealt) + 1
        dealt[max(range(len(shares)), key=lambda i: (shares[i] * total - dealt[i], -i))] += 1
    return [after - earlier for after, earlier in zip(dealt, before, strict=True)]


def _of(part: EnvironmentPart, row: TaskRow) -> TaskRow:
    return replace(row, environment=part.name)
