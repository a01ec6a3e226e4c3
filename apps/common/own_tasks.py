"""Tasks of a source that a user brings: `--task-source FILE.py:NAME`.

NAME is a class or function that makes a `rollout.TaskSource`. It gets `seed` and `held_out` (how many tasks an
evaluation asks) where it names them; its other arguments are options. A source has `tasks(step, count)` and
`held_out()`, lists of `rollout.TaskRow`; one whose tasks hang on more than the step's number has `cursor()` and
`restore(cursor)` too. `--environment` plays its tasks; without it the source says by `environment(row)` what plays
each: a `rollout.Task`, or a factory of environments.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from apps.common.plugins import environment_name
from rollout import EnvironmentFactory, TaskRow
from rollout.environments.system_prompt import SystemPrompt
from seqpack.extensions.load_object import load_object
from seqpack.extensions.options import bound, inputs_of

INPUTS = ("seed", "held_out")


@dataclass(frozen=True)
class OwnTasks:
    """Tasks of a user's source; another process makes it by its name, at the same place."""

    spec: str
    options: tuple[str, ...]
    inputs: Mapping[str, int]
    source: Any
    system_prompt: str | None = None

    @staticmethod
    def of(
        spec: str, options: tuple[str, ...], inputs: Mapping[str, int], system_prompt: str | None, played: bool
    ) -> "OwnTasks":
        """Return the tasks of the source that a name and its options make; `played`: --environment plays them.

        Raises:
            ValueError: there is no such source, it takes other options, or lacks a method.
        """
        source = _made(spec, options, inputs)
        missing = [name for name in ("tasks", "held_out") if not callable(getattr(source, name, None))]
        missing += ["environment"] * (not played and not callable(getattr(source, "environment", None)))
        if missing:
            raise ValueError(
                f"--task-source {spec} gave a {type(source).__name__} without {', '.join(missing)}: a "
                "source has tasks(step, count), held_out(), and environment(row) unless --environment plays its tasks"
            )
        return OwnTasks(spec, options, inputs, source, system_prompt)

    @property
    def name(self) -> str:
        """The source's own, or that of its code."""
        return str(getattr(self.source, "name", environment_name(self.spec)))

    @property
    def skipped(self) -> Mapping[str, int]:
        """Nothing, unless the source says so."""
        return dict(getattr(self.source, "skipped", {}))

    @property
    def held_out_metric(self) -> str | None:
        """What the source declares that its mean reward is called; None: nothing."""
        return getattr(self.source, "held_out_metric", None)

    def tasks(self, step: int, count: int) -> list[TaskRow]:
        """Return the step's tasks; ValueError where there are fewer or more, or they are something else."""
        rows = self._rows(self.source.tasks(step, count), f"tasks({step}, {count})")
        if len(rows) != count:
            raise ValueError(f"--task-source {self.spec}: tasks({step}, {count}) gave {len(rows)} tasks")
        return rows

    def held_out(self) -> list[TaskRow]:
        """Return the held-out tasks; ValueError where there are none, or they are something else."""
        rows = self._rows(self.source.held_out(), "held_out()")
        if not rows:
            raise ValueError(f"--task-source {self.spec}: held_out() gave no tasks, a run asks some of them")
        return rows

    def environment(self, row: TaskRow) -> EnvironmentFactory:
        """Return what plays a task."""
        factory: EnvironmentFactory = self.source.environment(row)
        return factory if self.system_prompt is None else SystemPrompt(self.system_prompt)(factory)

    def cursor(self) -> dict[str, Any]:
        """Return where the source is; nothing where its tasks follow from the step's number."""
        return dict(self.source.cursor()) if hasattr(self.source, "cursor") else {}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Continue from a cursor."""
        if hasattr(self.source, "restore"):
            self.source.restore(cursor)

    def _rows(self, rows: Any, what: str) -> list[TaskRow]:
        if not isinstance(rows, Sequence) or not all(isinstance(row, TaskRow) for row in rows):
            raise ValueError(
                f"--task-source {self.spec}: {what} gave {rows!r:.80}, a list of rollout.TaskRow is needed"
            )
        return list(rows)

    def __reduce__(self) -> Any:
        return _restored, (self.spec, self.options, dict(self.inputs), self.system_prompt, self.cursor())


def _made(spec: str, options: Sequence[str], inputs: Mapping[str, int]) -> Any:
    make = load_object(spec, "task-source")
    if not callable(make):
        raise ValueError(f"--task-source {spec} is a {type(make).__name__}: a class or function that makes a source")
    given = {name: inputs[name] for name in inputs_of(make, INPUTS)}
    return bound("--task-source-options", spec, make, options, INPUTS)(**given)


def _restored(
    spec: str, options: tuple[str, ...], inputs: Mapping[str, int], prompt: str | None, cursor: Mapping[str, Any]
) -> OwnTasks:
    tasks = OwnTasks(spec, options, inputs, _made(spec, options, inputs), prompt)
    if cursor:
        tasks.restore(cursor)
    return tasks
