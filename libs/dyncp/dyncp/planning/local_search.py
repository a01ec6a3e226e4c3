"""Moves and swaps between the groups of a plan, for a few dozen sequences.

A plan is seen as steps of sets of sequences; how many ranks each set gets follows: in a step all sets begin with the
smallest size that holds them, then the slowest is widened until no ranks are left that would make it faster. That is
the least time of the step for these sets, because the slowest becomes faster by more ranks alone.

1. For each step in turn, the slowest first, look at its slowest set: move one of its sequences to another set, to a set
   of its own, or swap it with another set's; join the set with another of the step; move all of it to another step, or
   to a step of its own. The first change that makes the sum of the steps' times smaller is made.
2. Deal the slowest set and another of its step anew, every way there is, where they are few sequences.
3. Empty the step with the least in it, its sequences one by one into the best sets elsewhere; kept if that is faster.
4. From the beginning, until nothing helps or the evaluations are used up.
5. To `PERTURBED` sequences: a few random moves, then from the beginning; what is no slower is kept. Until nothing
   was gained so often as `MISSES` says, or the evaluations are used up.

Deterministic, the random moves too; never slower than the plan it begins with.
"""

import random
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dyncp.planning.problem import CandidatePlan, Problem

EVALUATIONS = 300
"""Steps that are timed: some five milliseconds."""
PERTURBED = 16
"""Up to so many sequences a search goes on beyond the first plan that no change makes faster."""
PERTURBED_EVALUATIONS = 1000
MISSES = 100
MOST_MOVES = 5
MAX_EXCHANGE = 7
"""Sequences of two sets that are dealt every way there is: 63."""

Sets = tuple[tuple[int, ...], ...]


def improved(problem: Problem, candidate: CandidatePlan, sizes: Sequence[int] | None = None) -> CandidatePlan:
    """Return a candidate that is no slower, by local search; the same one without an improvement.

    sizes: those that groups may have, all of the problem's by default. With one, a static candidate stays static.
    """
    sizes = problem.sizes if sizes is None else sizes
    search = _Search(problem, sizes)
    steps = search.descended([_step((), *(tuple(b.samples) for b in step)) for step in candidate.steps])
    if len(problem.lengths) <= PERTURBED:
        steps = search.kicked(steps)
    total = search.total(steps)
    if total >= candidate.total * (1 - 1e-12):
        return candidate
    made = [[problem.bin_of(size, samples) for size, samples in zip(search.sizes(s), s, strict=True)] for s in steps]
    return problem.candidate(made, candidate.name if len(sizes) == 1 else "dynamic")


class _Search:
    """The times of sets and steps, each computed once."""

    def __init__(self, problem: Problem, sizes: Sequence[int]) -> None:
        self.problem, self.group_sizes = problem, sizes
        self.rooms, self.bases = problem.rooms_of(np.array(sizes)), problem.coefficients_of(sizes)[0]
        self.left = PERTURBED_EVALUATIONS if len(problem.lengths) <= PERTURBED else EVALUATIONS
        self._widths: dict[tuple[int, ...], list[tuple[int, float]]] = {}
        self._steps: dict[Sets, tuple[float, tuple[int, ...]]] = {}

    def seconds(self, step: Sets) -> float:
        """Return the least time of a step of these sets; infinite where the ranks do not hold them, 0 without sets."""
        return self._timed(step)[0] if step else 0.0

    def sizes(self, step: Sets) -> tuple[int, ...]:
        """Return the number of ranks of each set of the step."""
        return self._timed(step)[1]

    def _timed(self, step: Sets) -> tuple[float, tuple[int, ...]]:
        if step not in self._steps:
            self.left -= 1
            self._steps[step] = self._time(step)
        return self._steps[step]

    def _time(self, step: Sets) -> tuple[float, tuple[int, ...]]:
        widths = [self._widths_of(samples) for samples in step]
        if not all(widths):
            return float("inf"), ()
        at = [0] * len(step)
        idle = self.problem.world_size - sum(choices[0][0] for choices in widths)
        if idle < 0:
            return float("inf"), ()
        while step:
            slowest = max(range(len(step)), key=lambda i: widths[i][at[i]][1])
            choices, place = widths[slowest], at[slowest]
            if place + 1 == len(choices) or choices[place + 1][0] - choices[place][0] > idle:
                break
            idle -= choices[place + 1][0] - choices[place][0]
            at[slowest] += 1
        chosen = [choices[place] for choices, place in zip(widths, at, strict=True)]
        seconds = max((seconds for _, seconds in chosen), default=0.0)
        if idle:
            seconds = max(seconds, self.problem.table[1].base)
        return seconds, tuple(size for size, _ in chosen)

    def _widths_of(self, samples: tuple[int, ...]) -> list[tuple[int, float]]:
        """Return (size, seconds) of a set, sizes ascending, seconds descending: only sizes that are faster."""
        if samples not in self._widths:
            members = list(samples)
            tokens, seconds = self._columns
            fitting = tokens[:, members].sum(axis=1) <= self.rooms
            total = self.bases + seconds[:, members].sum(axis=1)
            widths: list[tuple[int, float]] = []
            for size, fits, value in zip(self.group_sizes, fitting.tolist(), total.tolist(), strict=True):
                if fits and (not widths or value < widths[-1][1]):
                    widths.append((size, value))
            self._widths[samples] = widths
        return self._widths[samples]

    @cached_property
    def _columns(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The tokens i64[sizes, samples] and seconds f64[sizes, samples] of each sequence in each size."""
        columns = [self.problem.column_arrays(size) for size in self.group_sizes]
        tokens, seconds = zip(*columns, strict=True)
        return np.stack(tokens), np.stack(seconds)

    def total(self, steps: list[Sets]) -> float:
        """Return the seconds of all steps."""
        return sum(map(self.seconds, steps))

    def descended(self, steps: list[Sets]) -> list[Sets]:
        """Return the steps after greedy changes, until none helps or the evaluations are used up."""
        while self.left > 0:
            changed = self.change(steps) or self.emptied(steps)
            if changed is None:
                break
            steps = changed
        return steps

    def kicked(self, steps: list[Sets]) -> list[Sets]:
        """Return the fastest steps of random moves, each followed by greedy changes."""
        rng, misses = random.Random(0), 0
        while self.left > 0 and misses < MISSES:
            moved = self.descended(self._moved_at_random(steps, rng))
            before, after = self.total(steps), self.total(moved)
            misses = 0 if after < before * (1 - 1e-9) else misses + 1
            steps = moved if after <= before else steps
        return steps

    def _moved_at_random(self, steps: list[Sets], rng: random.Random) -> list[Sets]:
        """Return the steps after a few sequences moved to any other set or a new one, where the ranks hold them."""
        for _ in range(rng.randint(1, MOST_MOVES)):
            at = rng.randrange(len(steps))
            mine = rng.choice(steps[at])
            sample = rng.choice(mine)
            rest = tuple(i for i in mine if i != sample)
            places = [(k, samples) for k, step in enumerate(steps) for samples in step if samples is not mine]
            chosen = rng.randrange(len(places) + 1)
            if chosen < len(places):
                k, theirs = places[chosen]
                changed = _moved(steps, at, k, mine, theirs, rest, (*theirs, sample))
            else:
                changed = {at: _step(_without(steps[at], mine), rest, (sample,))}
            if all(self.seconds(step) < float("inf") for step in changed.values()):
                steps = _replaced(steps, changed)
        return steps

    def change(self, steps: list[Sets]) -> list[Sets] | None:
        """Return the steps after the first change of a slowest set that reduces their sum; None where none does."""
        for at in sorted(range(len(steps)), key=lambda k: -self.seconds(steps[k])):
            slowest = self._slowest(steps[at])
            for changed in self._neighbours(steps, at, slowest):
                before = sum(self.seconds(steps[k]) for k in changed if k < len(steps))
                if sum(self.seconds(step) for step in changed.values()) < before * (1 - 1e-9):
                    return _replaced(steps, changed)
                if self.left <= 0:
                    return None
        return None

    def _slowest(self, step: Sets) -> tuple[int, ...]:
        sizes = self.sizes(step)
        times = [dict(self._widths_of(samples))[size] for samples, size in zip(step, sizes, strict=True)]
        return step[times.index(max(times))]

    def _neighbours(self, steps: list[Sets], at: int, mine: tuple[int, ...]) -> Iterator[dict[int, Sets]]:
        """Yield changes of one set, each as the steps that it changes."""
        others = _without(steps[at], mine)
        places = [(k, samples) for k, step in enumerate(steps) for samples in step if samples is not mine]
        for sample in mine:
            rest = tuple(i for i in mine if i != sample)
            for k, theirs in places:
                yield _moved(steps, at, k, mine, theirs, rest, (*theirs, sample))
            if rest:
                yield {at: _step(others, rest, (sample,))}
        for sample in mine:
            rest = tuple(i for i in mine if i != sample)
            for k, theirs in places:
                for other in theirs:
                    left = tuple(i for i in theirs if i != other)
                    yield _moved(steps, at, k, mine, theirs, (*rest, other), (*left, sample))
        for theirs in others:
            yield {at: _step(_without(others, theirs), (*mine, *theirs))}
        for k, step in enumerate(steps):
            if k != at:
                yield {at: others, k: _step(step, mine)}
        if others:
            yield {at: others, len(steps): (mine,)}
        for theirs in others:
            for dealt in _dealt((*mine, *theirs)):
                yield {at: _step(_without(others, theirs), *dealt)}

    def emptied(self, steps: list[Sets]) -> list[Sets] | None:
        """Return the steps without the emptiest, its sequences moved to the others; None unless that is faster."""
        if len(steps) < 2:
            return None
        lengths = self.problem.lengths
        gone = min(range(len(steps)), key=lambda k: sum(int(lengths[i]) for s in steps[k] for i in s))
        others = [step for k, step in enumerate(steps) if k != gone]
        for sample in sorted((i for s in steps[gone] for i in s), key=lambda i: -int(lengths[i])):
            choices = [
                {k: _step(_without(step, samples), (*samples, sample))}
                for k, step in enumerate(others)
                for samples in step
            ]
            choices += [{k: _step(step, (sample,))} for k, step in enumerate(others)]
            least, place = min(
                (sum(self.seconds(step) - self.seconds(others[k]) for k, step in choice.items()), n)
                for n, choice in enumerate(choices)
            )
            if least == float("inf"):
                return None
            others = _replaced(others, choices[place])
        faster = self.total(others) < self.total(steps) * (1 - 1e-9)
        return others if faster else None


def _step(others: Sets, *sets: tuple[int, ...]) -> Sets:
    """Return the step of these sets in canonical order, without empty ones."""
    return tuple(sorted((*others, *(tuple(sorted(samples)) for samples in sets if samples))))


def _dealt(samples: tuple[int, ...]) -> Iterator[Sets]:
    """Yield every split of up to `MAX_EXCHANGE` samples into two sets; none for more samples."""
    if len(samples) <= MAX_EXCHANGE:
        for bits in range(1, 1 << len(samples) - 1):
            yield tuple(tuple(i for n, i in enumerate(samples) if bits >> n & 1 == side) for side in (1, 0))


def _without(step: Sets, samples: tuple[int, ...]) -> Sets:
    return tuple(other for other in step if other is not samples)


def _moved(
    steps: list[Sets],
    at: int,
    k: int,
    mine: tuple[int, ...],
    theirs: tuple[int, ...],
    new_mine: tuple[int, ...],
    new_theirs: tuple[int, ...],
) -> dict[int, Sets]:
    """Return the changed steps: set `mine` of step `at` and set `theirs` of step `k` are replaced by new ones."""
    if at == k:
        return {at: _step(_without(_without(steps[at], mine), theirs), new_mine, new_theirs)}
    return {at: _step(_without(steps[at], mine), new_mine), k: _step(_without(steps[k], theirs), new_theirs)}


def _replaced(steps: list[Sets], changed: dict[int, Sets]) -> list[Sets]:
    """Return the steps with some of them changed, or one more, without empty ones."""
    return [step for k, old in enumerate([*steps, ()]) if (step := changed.get(k, old))]
