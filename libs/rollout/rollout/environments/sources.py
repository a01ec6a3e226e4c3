"""Sources of tasks: rows with stable ids, in an order that goes on where it stopped."""

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from rollout.seeds import derive_seed


@dataclass(frozen=True)
class TaskRow:
    """One task: an id that is the same in every run, and its data (an environment finds it in `EpisodeContext.data`).

    `visit` counts how often it was asked before in this run; id and visit together fix the seeds of its episodes. A
    source that makes its tasks, endlessly, can't know how often it has made this one: `draw` names the place in its
    stream instead, and stands for both, so that a task which comes twice is sampled anew.
    `environment` keeps the tasks of several environments apart; it is no part of the id that an environment sees.
    """

    id: str
    data: Mapping[str, Any] = field(default_factory=dict)
    visit: int = 0
    environment: str = ""
    draw: str = ""

    @property
    def key(self) -> str:
        """Key that tells the task from all others of a run: environment/id, or the id where it names no environment."""
        return f"{self.environment}/{self.id}" if self.environment else self.id

    def seed(self, run: int | None) -> int | None:
        """Return the seed of this row's episodes in a run with that seed, wherever the row stands."""
        return None if run is None else derive_seed(run, "task", self.draw or self.key, self.visit)


class TaskSource(Protocol):
    """Tasks to train on, step by step, and tasks held out."""

    @property
    def name(self) -> str:
        """Name of the source in tables."""
        ...

    def tasks(self, step: int, count: int) -> list[TaskRow]:
        """Return the tasks of a step, the same at every call until the next step's are asked for."""
        ...

    def held_out(self) -> list[TaskRow]:
        """Return the evaluation tasks, none of which is trained on."""
        ...

    def cursor(self) -> dict[str, Any]:
        """Return the position of the source as JSON values, which a checkpoint saves."""
        ...

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Continue from a cursor. Raise ValueError for the cursor of another source."""
        ...


class RowSource:
    """Rows of data in an endless pass that is shuffled anew for every epoch.

    The order follows from `seed` and the rows' number alone. Steps may ask for different counts; each begins where the
    one before it ended. Raises ValueError for no rows, and an id that two rows have.
    """

    def __init__(self, name: str, rows: Sequence[TaskRow], held_out: Sequence[TaskRow] = (), seed: int = 0) -> None:
        self.name = name
        self._rows = tuple(rows)
        self._held_out = tuple(held_out)
        self._seed = seed
        self._step, self._start, self._end = -1, 0, 0
        ids = [row.id for row in (*self._rows, *self._held_out)]
        if not self._rows:
            raise ValueError(f"task source {name!r} has no rows to train on")
        if len(set(ids)) < len(ids):
            raise ValueError(
                f"task source {name!r} has two rows of the id {next(i for i in ids if ids.count(i) > 1)!r}"
            )
        self._fingerprint = hashlib.blake2b("\0".join(ids).encode(), digest_size=8).hexdigest()

    def tasks(self, step: int, count: int) -> list[TaskRow]:
        """Return the next rows. Raise ValueError for a step before the last one that was asked for."""
        if step < self._step:
            raise ValueError(f"task source {self.name!r} is at step {self._step}: step {step} is over")
        if step > self._step:
            self._step, self._start = step, self._end
        self._end = self._start + count
        return [self._row(n) for n in range(self._start, self._end)]

    def held_out(self) -> list[TaskRow]:
        """Return the held-out rows, in order."""
        return list(self._held_out)

    def cursor(self) -> dict[str, Any]:
        """Return the step, where it began and ended, and a fingerprint of the rows."""
        place = {"step": self._step, "start": self._start, "end": self._end}
        return {"name": self.name, "seed": self._seed, "rows": self._fingerprint, **place}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Continue from a cursor of a source with the same name, seed and rows."""
        for what, mine in (("name", self.name), ("seed", self._seed), ("rows", self._fingerprint)):
            if cursor.get(what) != mine:
                raise ValueError(
                    f"the cursor is not of task source {self.name!r}: its {what} is {cursor.get(what)!r}, not "
                    f"{mine!r}; give the data and the seed that the run was begun with"
                )
        self._step, self._start, self._end = (int(cursor[key]) for key in ("step", "start", "end"))

    def _row(self, place: int) -> TaskRow:
        epoch, at = divmod(place, len(self._rows))
        row = self._rows[epoch_order(self._seed, epoch, len(self._rows))[at]]
        return TaskRow(row.id, row.data, epoch, row.environment)


@lru_cache(maxsize=4)
def epoch_order(seed: int, epoch: int, size: int) -> tuple[int, ...]:
    """Return the order of an epoch: a permutation of `size` indices."""
    return tuple(random.Random(derive_seed(seed, "epoch", epoch)).sample(range(size), size))
