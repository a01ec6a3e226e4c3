"""Tasks by the number of their group, for schedules that run ahead: numbers follow the order of the run's tasks."""

from collections.abc import Mapping
from typing import Any

from rollout import TaskRow
from schedules.protocols import Tasks


class NumberedRows:
    """Rows by number: number n is the row n % `count` of step n // `count`. Steps are asked of the source in order.

    `place` is where an earlier run was (`place` of that time). `forget` lets go of what is never asked for again.
    """

    def __init__(self, tasks: Tasks, count: int, place: Mapping[str, Any] | None = None) -> None:
        self._tasks, self._count = tasks, count
        self._steps: dict[int, list[TaskRow]] = {}
        self._before: dict[int, dict[str, Any]] = {}
        self._next = 0
        if place:
            self._next = int(place["step"])
            tasks.restore(place["cursor"])

    def __getitem__(self, number: int) -> TaskRow:
        """Return the row of a number. KeyError: it was forgotten."""
        step, at = divmod(number, self._count)
        while self._next <= step:
            self._before[self._next] = self._tasks.cursor()
            self._steps[self._next] = self._tasks.tasks(self._next, self._count)
            self._next += 1
        return self._steps[step][at]

    def forget(self, number: int) -> None:
        """Drop the rows below this number: none is asked for again."""
        for step in [step for step in self._steps if step < number // self._count]:
            del self._steps[step], self._before[step]

    def place(self, number: int) -> dict[str, Any]:
        """Return from where a later run can ask for this number and all after it, as JSON can write it."""
        step = number // self._count
        if step >= self._next:
            step, cursor = self._next, self._tasks.cursor()
        else:
            cursor = self._before[step]
        return {"step": step, "cursor": cursor}
