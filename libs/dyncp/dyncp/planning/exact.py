"""The fastest plan of a few sequences, by dynamic programming over their subsets.

1. For every subset and group size: the seconds of one group that holds it (infinite where it has no room). All distinct
   seconds are the times that a step can take; what is longer than a known plan leaves to one step is dropped.
2. For every subset and step time: the fewest ranks of one group that holds the subset within that time.
3. For every subset and step time: the fewest ranks of any partition of it into groups, the group of its first sequence
   split off. The fewest ranks are additive over groups; that is why they are kept, and not the seconds.
4. For every subset: the least step time within which the world has enough ranks for it.
5. For every subset: the least sum of step times over its partitions into steps, the step of its first sequence split
   off. That of all sequences is the optimum.

`exact_static` does the same for groups of one size, which is less work, for a few sequences more.

Held by tests: the sum of seconds is that of `dyncp.testing.exhaustive`, which tries every plan.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dyncp.planning.problem import Bin, CandidatePlan, Problem

MOST_SAMPLES = 9
MOST_STATIC = 11
"""Sequences of which the fastest plan with groups of one size is found: some ten milliseconds a size."""
MOST_ENTRIES = 20_000_000
"""Additions of step 3: some thirty milliseconds."""

MOST_GROUPS = 100_000
"""Subsets times sizes of step 1: as many milliseconds."""

Ints = NDArray[np.int64]


def exact_candidate(problem: Problem, at_most: float, sizes: Sequence[int]) -> tuple[CandidatePlan, float] | None:
    """Return (the fastest plan of groups of these sizes, ascending; a lower bound of their seconds); None where the
    search takes too long, or no plan takes at most `at_most` seconds.

    The two times are one unless ranks left idle, which run a dummy alone, take longer than a step's groups.
    """
    count = len(problem.lengths)
    if not 0 < count <= MOST_SAMPLES or len(sizes) << count > MOST_GROUPS:
        return None
    alone = _group_seconds(problem, sizes)
    # A little longer than exactly: the order of additions must not rule out the known plan's own groups.
    longest = (at_most - (problem.min_steps - 1) * problem.least_base) * (1 + 1e-9)
    times = np.unique(alone[alone <= longest])
    pieces = sum(len(firsts) for firsts, _ in _splits(count))
    if not len(times) or pieces * len(times) > MOST_ENTRIES:
        return None
    single = _fewest_ranks(problem, alone, times, sizes)
    ranks = _partitioned(single, count)
    enough = ranks <= problem.world_size
    steps = np.where(enough.any(axis=1), enough.argmax(axis=1), len(times))
    least = np.append(times, np.inf)[steps]
    chosen = _best_steps(least, count)
    if chosen is None:
        return None
    bins = [_groups_of(problem, subset, int(steps[subset]), single, ranks) for subset in chosen]
    return problem.candidate(bins, "exact"), float(least[chosen].sum())


def exact_static(problem: Problem, size: int) -> CandidatePlan | None:
    """Return the fastest plan of groups of `size` ranks, which must hold each sequence; None above `MOST_STATIC`.

    For every subset and number of groups, the least time in which so many side by side hold it, the group of its first
    sequence split off; then steps as in step 5.
    """
    count = len(problem.lengths)
    if not 0 < count <= MOST_STATIC:
        return None
    alone = _group_seconds(problem, [size])[:, 0]
    most = min(count, problem.world_size // size)
    least = np.full((most + 1, 1 << count), np.inf)
    least[:, 0] = 0.0
    splits = _splits(count)
    for subset, (firsts, rests) in enumerate(splits):
        if subset:
            least[1:, subset] = np.maximum(alone[firsts], least[:-1, rests]).min(axis=1)
    steps = []
    for subset in _best_steps(least[most], count) or []:
        groups, left = [], subset
        for others in range(most - 1, -1, -1):
            firsts, rests = splits[left]
            if left:
                at = int(np.maximum(alone[firsts], least[others, rests]).argmin())
                groups.append(problem.bin_of(size, _members(int(firsts[at]), count)))
                left = int(rests[at])
        steps.append(groups)
    return problem.candidate(steps, f"static-{size}")


def _members(subset: int, count: int) -> list[int]:
    """Return the items of a subset, which is an integer of bits."""
    return [i for i in range(count) if subset >> i & 1]


@lru_cache(maxsize=MOST_STATIC)
def _splits(count: int) -> list[tuple[Ints, Ints]]:
    """Return, for every subset of `count` items as bits: (its subsets with its lowest item, their complements)."""
    splits = [(np.zeros(0, dtype=np.int64),) * 2]
    for subset in range(1, 1 << count):
        lowest = subset & -subset
        rest = subset ^ lowest
        parts, part = [], rest
        while True:
            parts.append(part | lowest)
            if not part:
                break
            part = (part - 1) & rest
        firsts = np.array(parts, dtype=np.int64)
        splits.append((firsts, subset ^ firsts))
    return splits


def _group_seconds(problem: Problem, sizes: Sequence[int]) -> NDArray[np.float64]:
    """Return f64[subsets, sizes]: seconds of one group; infinite without room and for the empty subset."""
    count = len(problem.lengths)
    members = (np.arange(1 << count)[:, None] >> np.arange(count)) & 1
    columns = [problem.column_arrays(size) for size in sizes]
    tokens, seconds = (np.stack(part, axis=1) for part in zip(*columns, strict=True))
    group_seconds: NDArray[np.float64] = problem.coefficients_of(sizes)[0] + members @ seconds
    group_seconds[members @ tokens > problem.rooms_of(np.array(sizes))] = np.inf
    group_seconds[0] = np.inf
    return group_seconds


def _fewest_ranks(
    problem: Problem, alone: NDArray[np.float64], times: NDArray[np.float64], sizes: Sequence[int]
) -> NDArray[np.int16]:
    """Return i16[subsets, times]: the smallest size that holds the subset within the time; else world + 1."""
    ranks = np.append(sizes, problem.world_size + 1).astype(np.int16)
    fewest = np.empty((len(alone), len(times)), dtype=np.int16)
    for subset, seconds in enumerate(np.minimum.accumulate(alone, axis=1)):
        # The more ranks, the fewer seconds: the first size within a time, counted from the widest.
        within = np.searchsorted(seconds[::-1], times, side="right")
        fewest[subset] = ranks[len(seconds) - within]
    return fewest


def _partitioned(single: NDArray[np.int16], count: int) -> NDArray[np.int16]:
    """Return i16[subsets, times]: the fewest ranks over all partitions into groups."""
    ranks = np.zeros_like(single)
    for subset, (firsts, rests) in enumerate(_splits(count)):
        if subset:
            ranks[subset] = (single[firsts] + ranks[rests]).min(axis=0)
    return ranks


def _best_steps(seconds: NDArray[np.float64], count: int) -> list[int] | None:
    """Return the partition of all items into subsets with the least sum of seconds; None where it is infinite."""
    total = np.zeros(1 << count)
    choice = np.zeros(1 << count, dtype=np.int64)
    for subset, (firsts, rests) in enumerate(_splits(count)):
        if subset:
            sums = seconds[firsts] + total[rests]
            at = int(sums.argmin())
            total[subset], choice[subset] = sums[at], firsts[at]
    left = (1 << count) - 1
    if not np.isfinite(total[left]):
        return None
    chosen = []
    while left:
        chosen.append(int(choice[left]))
        left ^= chosen[-1]
    return chosen


def _groups_of(
    problem: Problem, subset: int, time: int, single: NDArray[np.int16], ranks: NDArray[np.int16]
) -> list[Bin]:
    """Return the groups of one step, by backtracking through step 3."""
    bins = []
    while subset:
        firsts, rests = _splits(len(problem.lengths))[subset]
        at = int((single[firsts, time] + ranks[rests, time]).argmin())
        members = _members(int(firsts[at]), len(problem.lengths))
        bins.append(problem.bin_of(int(single[firsts[at], time]), members))
        subset = int(rests[at])
    return bins
