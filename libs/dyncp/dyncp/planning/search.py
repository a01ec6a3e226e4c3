"""The combinatorial part of planning: sequences into groups, groups into steps. Plain Python over floats, made to be
quick.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from dyncp.planning.cost import Coefficients
from dyncp.planning.sizes import Layout

RECENT = 32  # open groups that are looked at for one more sequence


@dataclass(slots=True, eq=False)
class Bin:
    """A group in the making: `size` ranks, `room` tokens left in all of it, `seconds` so far without the base."""

    size: int
    room: int
    seconds: float = 0.0
    samples: list[int] = field(default_factory=list)


class Shape(NamedTuple):
    """One candidate plan: bins of every step (idle ranks not listed), and its time."""

    steps: list[list[Bin]]
    seconds: list[float]

    @property
    def total(self) -> float:
        """Predicted seconds of all steps."""
        return sum(self.seconds)


class Problem:
    """Lengths, sizes and coefficients, with everything a search asks for computed once.

    sizes: the allowed group sizes, ascending. table[s]: coefficients of size s.
    """

    def __init__(
        self, lengths: Sequence[int], world_size: int, cap: int, layout: Layout, table: dict[int, Coefficients]
    ) -> None:
        self.world_size, self.cap, self.layout, self.table = world_size, cap, layout, dict(sorted(table.items()))
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.pairs = self.lengths.astype(np.float64) ** 2 / 2
        self.order = np.argsort(-self.lengths, kind="stable").tolist()
        self.sizes = list(self.table)
        self._columns: dict[int, tuple[list[int], list[float]]] = {}

    def column(self, size: int) -> tuple[list[int], list[float]]:
        """(tokens, seconds) of every sequence in a group of this size; tokens include the layout's padding."""
        if size not in self._columns:
            tokens, seconds = self.columns_array(size)
            self._columns[size] = tokens.tolist(), seconds.tolist()
        return self._columns[size]

    def columns_array(self, size: int) -> tuple[np.ndarray, np.ndarray]:
        """The same as arrays."""
        align = 2 * size if self.layout == "zigzag" and size > 1 else 1
        factors = self.table[size]
        return -(-self.lengths // align) * align, factors.token * self.lengths + factors.pair * self.pairs

    def room(self, size: int) -> int:
        """Tokens a group of this size can hold."""
        return size * (self.cap // 2 * 2 if self.layout == "zigzag" and size > 1 else self.cap)

    @cached_property
    def seconds_by_size(self) -> np.ndarray:
        """f64[sizes, samples]: seconds of a group of each size with this sequence alone; infinite for no room."""
        sizes = np.asarray(self.sizes)[:, None]
        base, token, pair = (np.array(column)[:, None] for column in zip(*self.table.values(), strict=True))
        align = np.where(sizes > 1, 2 * sizes, 1) if self.layout == "zigzag" else 1
        room = np.array([self.room(size) for size in self.sizes])[:, None]
        seconds = base + token * self.lengths + pair * self.pairs
        return np.where(-(-self.lengths // align) * align <= room, seconds, np.inf)

    @cached_property
    def smallest_sizes(self) -> np.ndarray:
        """For every sequence the smallest allowed size that can hold it; 0 where none can."""
        fits = np.isfinite(self.seconds_by_size)
        return np.where(fits.any(axis=0), np.asarray(self.sizes)[fits.argmax(axis=0)], 0)

    def fullest_seconds(self, size: int) -> float:
        """No group of this size takes longer, whatever it holds: it is full of sequences as long as the longest."""
        room = self.room(size)
        return self.table[size].seconds(room, room * float(self.lengths.max(initial=0)) / 2)

    def step_seconds(self, bins: Sequence[Bin]) -> float:
        """A step lasts as long as its slowest group; idle ranks still run a dummy."""
        return max((self.table[b.size].base + b.seconds for b in bins), default=self.table[1].base)


def static_shape(problem: Problem, size: int) -> Shape:
    """Every group of one size, in as few steps as the cap allows; groups of like time share a step."""
    groups = problem.world_size // size
    tokens, _ = problem.column(size)
    fewest = max(1, -(-sum(tokens) // (problem.room(size) * groups)))
    for steps in (fewest, fewest + 1):
        bins = _balance(problem, problem.order, [Bin(size, problem.room(size)) for _ in range(steps * groups)])
        if bins is not None:
            return _cut(problem, bins, groups)
    return _cut(problem, _first_fit(problem, size), groups)


def dynamic_shapes(problem: Problem, targets: Sequence[float]) -> Iterator[Shape]:
    """One shape for each target, in ascending order, except where it would be the one before again."""
    before: tuple[list[int], bool] = [], False
    for target in targets:
        wanted = _wanted_sizes(problem, target)
        if before != (wanted, True):
            yield _dynamic_shape(problem, target, wanted)
        before = wanted, target >= max(problem.fullest_seconds(size) for size in set(wanted))


def _dynamic_shape(problem: Problem, target: float, wanted: list[int]) -> Shape:
    """Groups as small as `target` seconds a step allows: long sequences spread over ranks, short ones stay whole."""
    steps = _place_long(problem, [i for i in problem.order if wanted[i] > 1], wanted, target)
    short = [i for i in problem.order if wanted[i] == 1]
    steps = _place_short(problem, short, steps)
    for step in steps:
        _grow(problem, step)
    return Shape(steps, [problem.step_seconds(step) for step in steps])


def _balance(problem: Problem, samples: Sequence[int], bins: list[Bin]) -> list[Bin] | None:
    """Longest first, each into the least loaded bin with room; None where one finds no room.

    A bin without room for a sequence waits, widest room first, until a sequence is short enough for it again.
    """
    columns = {size: problem.column(size) for size in {b.size for b in bins}}
    heap = [(problem.table[b.size].base + b.seconds, i) for i, b in enumerate(bins)]
    heapify(heap)
    waiting: list[tuple[int, int, float]] = []
    for sample in samples:
        while waiting and -waiting[0][0] >= columns[bins[waiting[0][1]].size][0][sample]:
            _, i, loaded = heappop(waiting)
            heappush(heap, (loaded, i))
        while heap:
            loaded, i = heappop(heap)
            b = bins[i]
            tokens, seconds = columns[b.size]
            if tokens[sample] <= b.room:
                break
            heappush(waiting, (-b.room, i, loaded))
        else:
            return None
        b.room -= tokens[sample]
        b.seconds += seconds[sample]
        b.samples.append(sample)
        heappush(heap, (loaded + seconds[sample], i))
    return bins


def _first_fit(problem: Problem, size: int) -> list[Bin]:
    """Longest first into the first bin with room: always ends, whatever the cap."""
    tokens, seconds = problem.column(size)
    bins: list[Bin] = []
    for sample in problem.order:
        target = next((b for b in bins if b.room >= tokens[sample]), None)
        if target is None:
            target = Bin(size, problem.room(size))
            bins.append(target)
        target.room -= tokens[sample]
        target.seconds += seconds[sample]
        target.samples.append(sample)
    return bins


def _cut(problem: Problem, bins: list[Bin], groups: int) -> Shape:
    """Bins sorted by time, `groups` of them a step: the sum of the steps' maxima is least so."""
    bins = sorted((b for b in bins if b.samples), key=lambda b: -b.seconds)
    steps = [bins[i : i + groups] for i in range(0, len(bins), groups)] or [[]]
    return Shape(steps, [problem.step_seconds(step) for step in steps])


def _wanted_sizes(problem: Problem, target: float) -> list[int]:
    """For every sequence the smallest size that holds it and meets the target; else the fastest that holds it."""
    seconds = problem.seconds_by_size
    meets = seconds <= target
    places = np.where(meets.any(axis=0), meets.argmax(axis=0), seconds.argmin(axis=0))
    return np.asarray(problem.sizes)[places].tolist()


def _place_long(problem: Problem, samples: list[int], wanted: list[int], target: float) -> list[list[Bin]]:
    """Widest first: into an open group that stays within the target, else a new group in the first step with ranks
    left.
    """
    samples.sort(key=lambda i: -wanted[i])
    steps: list[list[Bin]] = []
    free: list[int] = []
    opened: list[Bin] = []
    columns = {size: (problem.table[size].base, *problem.column(size)) for size in {wanted[i] for i in samples}}
    last = min(samples, key=lambda i: problem.lengths[i], default=0)
    # A group that has no room or no time for the shortest of them is not looked at any more.
    full = {size: (tokens[last], target - base - seconds[last]) for size, (base, tokens, seconds) in columns.items()}
    first, at = 0, 0  # no step before `first` has ranks for a group of size `at`: sizes never grow again
    for sample in samples:
        for b in opened[-RECENT:]:
            base, tokens, seconds = columns[b.size]
            if tokens[sample] <= b.room and base + b.seconds + seconds[sample] <= target:
                break
        else:
            size = wanted[sample]
            b = Bin(size, problem.room(size))
            if size != at:
                first, at = 0, size
            while first < len(free) and free[first] < size:
                first += 1
            if first == len(steps):
                steps.append([])
                free.append(problem.world_size)
            steps[first].append(b)
            free[first] -= size
            opened.append(b)
            _, tokens, seconds = columns[size]
        b.room -= tokens[sample]
        b.seconds += seconds[sample]
        b.samples.append(sample)
        least, latest = full[b.size]
        if b.room < least or b.seconds > latest:
            opened.remove(b)
    return steps


def _place_short(problem: Problem, samples: list[int], steps: list[list[Bin]]) -> list[list[Bin]]:
    """Short sequences over the ranks that are left (and the room in wide groups), one more step at a time until they
    fit.
    """
    wide = [(b.room, b.seconds, list(b.samples)) for step in steps for b in step]
    total = int(problem.lengths[samples].sum()) if samples else 0
    while True:
        singles = sum(problem.world_size - sum(b.size for b in step) for step in steps)
        spare = singles * problem.cap + sum(room for room, _, _ in wide)
        bins: list[Bin] | None = None
        if total <= spare:
            for b, (room, seconds, members) in zip((b for step in steps for b in step), wide, strict=True):
                b.room, b.seconds, b.samples = room, seconds, list(members)
            new = [Bin(1, problem.room(1)) for _ in range(singles)]
            bins = _balance(problem, samples, [b for step in steps for b in step] + new)
        if bins is not None:
            break
        steps.append([])
    singles_left = sorted(bins[len(wide) :], key=lambda b: b.seconds)
    for step in sorted(steps, key=problem.step_seconds, reverse=True):
        for _ in range(problem.world_size - sum(b.size for b in step)):
            step.append(singles_left.pop())
    kept = [[b for b in step if b.samples] for step in steps]
    return [step for step in kept if step] or [[]]


def _grow(problem: Problem, step: list[Bin]) -> None:
    """Give idle ranks to the slowest group as long as that makes it faster."""
    idle = problem.world_size - sum(b.size for b in step)
    while idle and step:
        slowest = max(step, key=lambda b: problem.table[b.size].base + b.seconds)
        now = problem.table[slowest.size].base + slowest.seconds
        best: tuple[float, int] = (now, slowest.size)
        for size in problem.sizes:
            if slowest.size < size <= slowest.size + idle:
                tokens, seconds = problem.column(size)
                if sum(tokens[i] for i in slowest.samples) <= problem.room(size):
                    best = min(best, (problem.table[size].base + sum(seconds[i] for i in slowest.samples), size))
        if best[1] == slowest.size:
            return
        tokens, seconds = problem.column(best[1])
        idle -= best[1] - slowest.size
        slowest.size, slowest.seconds = best[1], sum(seconds[i] for i in slowest.samples)
        slowest.room = problem.room(best[1]) - sum(tokens[i] for i in slowest.samples)
