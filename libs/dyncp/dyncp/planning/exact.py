"""The fastest plan of a few sequences, by dynamic programming over their subsets.

1. For every subset and group size: the seconds of one group that holds it (infinite where it has no room). All distinct
   seconds are the times that a step can take; what is longer than a known plan leaves to one step is dropped.
2. For every subset and step time: the fewest ranks of one group that holds the subset within that time.
3. For every subset and step time: the fewest ranks of any partition of it into groups, the group of its first sequence
   split off. The fewest ranks are additive over groups; that is why they are kept, and not the seconds.
4. For every subset: the least step time within which the world has enough ranks for it.
5. For every subset: the least sum of step times over its partitions into steps, the step of its first sequence split
   off. That of all sequences is the optimum.

Held by tests: the sum of seconds is that of `dyncp.testing.exhaustive`, which tries every plan.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from dyncp.planning.problem import Bin, CandidatePlan, Problem

MOST_SAMPLES = 9
MOST_ENTRIES = 3_000_000
"""Additions of step 3: some ten milliseconds."""

Ints = NDArray[np.int64]


def exact_candidate(problem: Problem, at_most: float) -> CandidatePlan | None:
    """The fastest plan, of groups of the problem's sizes; None where that takes too long to find, or none takes less
    than `at_most` seconds.
    """
    count = len(problem.lengths)
    if not 0 < count <= MOST_SAMPLES:
        return None
    alone = _group_seconds(problem)
    # A little longer than exactly: the order of additions must not rule out the known plan's own groups.
    longest = (at_most - (problem.fewest_steps - 1) * problem.least_base) * (1 + 1e-9)
    times = np.unique(alone[alone <= longest])
    pieces = sum(len(firsts) for firsts, _ in _splits(count))
    if not len(times) or pieces * len(times) > MOST_ENTRIES:
        return None
    single = _fewest_ranks(problem, alone, times)
    ranks = _partitioned(single, count)
    enough = ranks <= problem.world_size
    steps = np.where(enough.any(axis=1), enough.argmax(axis=1), len(times))
    chosen = _best_steps(np.append(times, np.inf)[steps], count)
    if chosen is None:
        return None
    bins = [_groups_of(problem, subset, int(steps[subset]), single, ranks) for subset in chosen]
    return problem.candidate(bins, "exact")


@lru_cache(maxsize=MOST_SAMPLES)
def _splits(count: int) -> list[tuple[Ints, Ints]]:
    """For every subset of `count` items, as bits: (its subsets that hold its lowest item, what each leaves)."""
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


def _group_seconds(problem: Problem) -> NDArray[np.float64]:
    """f64[subsets, sizes]: seconds of one group; infinite for no room and for the empty subset."""
    count = len(problem.lengths)
    members = (np.arange(1 << count)[:, None] >> np.arange(count)) & 1
    columns = [problem.column_arrays(size) for size in problem.sizes]
    tokens, seconds = (np.stack(part, axis=1) for part in zip(*columns, strict=True))
    found = problem.base_token_pair[0] + members @ seconds
    found[members @ tokens > problem.rooms] = np.inf
    found[0] = np.inf
    return found


def _fewest_ranks(problem: Problem, alone: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.int16]:
    """i16[subsets, times]: the smallest size that holds the subset within the time; world + 1 where none does."""
    sizes = np.append(problem.size_array, problem.world_size + 1).astype(np.int16)
    found = np.empty((len(alone), len(times)), dtype=np.int16)
    for subset, seconds in enumerate(np.minimum.accumulate(alone, axis=1)):
        # The more ranks, the fewer seconds: the first size within a time, counted from the widest.
        within = np.searchsorted(seconds[::-1], times, side="right")
        found[subset] = sizes[len(seconds) - within]
    return found


def _partitioned(single: NDArray[np.int16], count: int) -> NDArray[np.int16]:
    """i16[subsets, times]: the fewest ranks over all partitions into groups."""
    ranks = np.zeros_like(single)
    for subset, (firsts, rests) in enumerate(_splits(count)):
        if subset:
            ranks[subset] = (single[firsts] + ranks[rests]).min(axis=0)
    return ranks


def _best_steps(seconds: NDArray[np.float64], count: int) -> list[int] | None:
    """The partition of all items into subsets with the least sum of seconds; None where it is infinite."""
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
    """The groups of one step, by walking back through step 3."""
    bins = []
    while subset:
        firsts, rests = _splits(len(problem.lengths))[subset]
        at = int((single[firsts, time] + ranks[rests, time]).argmin())
        members = [i for i in range(len(problem.lengths)) if int(firsts[at]) >> i & 1]
        bins.append(problem.bin_of(int(single[firsts[at], time]), members))
        subset = int(rests[at])
    return bins
