"""The state that a ledger's records add up to."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Sampled(NamedTuple):
    """A sampled group: the version that it began with, and where its payload lies in the file."""

    version: int
    offset: int
    length: int


@dataclass
class Ranges:
    """A set of numbers that are nearly dense, as sorted ranges that do not touch: [begins[i], ends[i])."""

    begins: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self.begins, number) - 1
        return at >= 0 and number < self.ends[at]

    def __len__(self) -> int:
        return sum(self.ends) - sum(self.begins)

    def add_all(self, numbers: Iterable[int]) -> None:
        """Add numbers that are not in the set."""
        pairs = sorted([*zip(self.begins, self.ends, strict=True), *((n, n + 1) for n in numbers)])
        self.begins, self.ends = [], []
        for begin, end in pairs:
            if self.ends and begin == self.ends[-1]:
                self.ends[-1] = end
            else:
                self.begins.append(begin)
                self.ends.append(end)

    def pairs(self) -> list[int]:
        """Return begin, end, begin, end, ..."""
        return [number for pair in zip(self.begins, self.ends, strict=True) for number in pair]


@dataclass
class LedgerState:
    """The state of every group, which is in one of `running`, `sampled`, `done`; those of `batches` are in `sampled`
    too.

    Groups move to `done` when they end without signal, or when a checkpoint holds the step that trained them. Until
    then they stay, with their payload: a run that resumes from the checkpoint before trains the same steps on them
    again.
    """

    saved: int = 0
    """The step of the last checkpoint."""
    run: int | None = None
    """The number of the run that writes the ledger; None where it has none."""
    done: Ranges = field(default_factory=Ranges)
    running: dict[int, int] = field(default_factory=dict)
    """Version of the weights that a running group began with, by group."""
    sampled: dict[int, Sampled] = field(default_factory=dict)
    batches: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Groups of each step after `saved`, by step."""
    taken: dict[int, int] = field(default_factory=dict)
    """Step of `batches` that trains a group, by group."""

    def begin(self, group: int, version: int) -> None:
        """Add a running group. Raise ValueError where it has begun already, and did not fail."""
        if group in self.running or group in self.sampled or group in self.done:
            raise ValueError(f"group {group} was begun already: it would be trained twice")
        self.running[group] = version

    def finish(self, group: int, offset: int, length: int) -> None:
        """Move a group from `running` to `sampled`. Raise ValueError where it is not being sampled."""
        self._check_running(group)
        self.sampled[group] = Sampled(self.running.pop(group), offset, length)

    def again(self, group: int) -> None:
        """Remove a running group. Raise ValueError where it is not being sampled."""
        self._check_running(group)
        del self.running[group]

    def drop(self, group: int) -> None:
        """Move a group from `running` to `done`. Raise ValueError where it is not being sampled."""
        self.again(group)
        self.done.add_all([group])

    def train(self, step: int, groups: Sequence[int]) -> None:
        """Add a step and its groups. Raise ValueError for a step that is not the next one, a group that is not sampled
        or that another step trains, and a recorded step with other groups."""
        if step in self.batches:
            if self.batches[step] != tuple(groups):
                raise ValueError(f"step {step} was recorded with other groups: a run that goes on repeats it as it was")
            return
        if step != self.saved + len(self.batches) + 1:
            raise ValueError(f"step {step} cannot follow step {self.saved + len(self.batches)}")
        for group in groups:
            if group not in self.sampled:
                raise ValueError(f"group {group} is not sampled: step {step} cannot train it")
            if group in self.taken:
                raise ValueError(f"group {group} is trained by step {self.taken[group]} already")
        if len(set(groups)) < len(groups):
            raise ValueError(f"step {step} names a group twice")
        self.batches[step] = tuple(groups)
        self.taken.update(dict.fromkeys(groups, step))

    def save(self, step: int) -> None:
        """Move the groups of all steps up to this one to `done`. Raise ValueError where it was never trained."""
        if not self.saved <= step <= self.saved + len(self.batches):
            raise ValueError(f"a checkpoint of step {step} cannot follow {self.saved} and {len(self.batches)} steps")
        ended: list[int] = []
        for number in range(self.saved + 1, step + 1):
            ended += self.batches.pop(number)
        for group in ended:
            del self.sampled[group], self.taken[group]
        self.done.add_all(ended)
        self.saved = step

    @property
    def next(self) -> int:
        """The lowest group number that never began."""
        return max(max((*self.running, *self.sampled), default=-1) + 1, *self.done.ends[-1:], 0)

    def missing(self) -> list[int]:
        """Return the groups below `next` that are not sampled and not done: they failed, or ran when the run ended."""
        holes = [
            n for b, e in zip([0, *self.done.ends], [*self.done.begins, self.next], strict=True) for n in range(b, e)
        ]
        return [number for number in holes if number not in self.sampled]

    def _check_running(self, group: int) -> None:
        if group not in self.running:
            raise ValueError(f"group {group} is not being sampled: it cannot have ended")
