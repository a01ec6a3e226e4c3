"""Column generation, held to an exhaustive search on small instances and to its own proven bound on large ones."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import seqpack.planning.cutting_stock
from seqpack.planning.bounds import Ints, bins_bound
from seqpack.planning.cutting_stock import KINDS, Pattern, cutting_stock, small_kinds
from seqpack.planning.exact import min_bins
from seqpack.planning.packing import pack

CAPACITY = 16384


def check(patterns: list[Pattern], lengths: list[int], counts: list[int], capacity: int) -> None:
    """Each length is in one bin, no bin is over the capacity."""
    assert [sum(pattern[i] for pattern in patterns) for i in range(len(lengths))] == counts
    assert all(sum(n * size for n, size in zip(p, lengths, strict=True)) <= capacity for p in patterns)
    assert all(sum(p) > 0 and min(p) >= 0 for p in patterns)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(3, 60), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(1, 6), min_size=4, max_size=4),
    st.integers(60, 130),
    st.sampled_from([1, 7]),
)
def test_small_instances_against_an_exhaustive_search(
    lengths: list[int], counts: list[int], capacity: int, unit: int
) -> None:
    counts = counts[: len(lengths)]
    while sum(counts) > 13:
        counts[counts.index(max(counts))] -= 1
    scaled = [unit * n for n in lengths]
    patterns, bound = cutting_stock(scaled, counts, unit * capacity)
    check(patterns, scaled, counts, unit * capacity)
    optimum = min_bins([n for n, k in zip(lengths, counts, strict=True) for _ in range(k)], capacity)
    assert bound <= optimum <= len(patterns) <= optimum + 1
    plan = pack([n for n, k in zip(lengths, counts, strict=True) for _ in range(k)], capacity)
    assert plan.lower_bound <= optimum <= len(plan.bins)


def fractional_bound(lengths: list[int], counts: list[int], capacity: int) -> float:
    """Return the best worth of all lengths by prices in twelfths under which no pattern is worth more than a bin.

    It is a bound below the linear program's, whose prices need not be twelfths.
    """
    kinds = range(len(lengths))
    patterns = itertools.product(*(range(capacity // n + 1) for n in lengths))
    fitting = np.array([p for p in patterns if sum(p[i] * lengths[i] for i in kinds) <= capacity])
    prices = np.array(list(itertools.product(range(13), repeat=len(lengths))))
    allowed = prices[(prices @ fitting.T).max(1) <= 12]
    return float((allowed @ np.array(counts)).max() / 12)


@pytest.mark.parametrize(
    ("lengths", "counts", "capacity"),
    [([8000, 5461, 4100], [5457, 5445, 5482], CAPACITY), ([51], [200], 100), ([60, 41, 40], [90, 50, 40], 100)],
)
def test_the_bound_is_that_of_the_linear_program(lengths: list[int], counts: list[int], capacity: int) -> None:
    patterns, bound = cutting_stock(lengths, counts, capacity)
    check(patterns, lengths, counts, capacity)
    assert len(patterns) == bound >= fractional_bound(lengths, counts, capacity)


@pytest.mark.parametrize("kinds", [2, 3, 5, 8, 12])
@pytest.mark.parametrize("count", [200, 2000, 20000])
@pytest.mark.parametrize("longest", [0.3, 0.5, 0.75])
def test_few_kinds_are_within_half_a_percent_of_the_bound(kinds: int, count: int, longest: float) -> None:
    for seed in range(2 if count == 20000 else 4):
        rng = np.random.default_rng([seed, kinds])
        lengths = rng.choice(rng.integers(300, int(longest * CAPACITY), kinds), count)
        plan = pack(lengths, CAPACITY)
        assert sorted(i for b in plan.bins for i in b) == list(range(count))
        assert max(plan.loads) <= CAPACITY
        assert len(plan.bins) <= max(plan.lower_bound + 1, 1.005 * plan.lower_bound)
        assert seed or pack(lengths, CAPACITY) == plan


OTHERS: dict[str, Callable[[np.random.Generator, int], Ints]] = {
    "uniform": lambda rng, n: rng.integers(1, CAPACITY + 1, n),
    "long-tailed": lambda rng, n: np.clip(rng.lognormal(np.log(700), 1.2, n), 1, CAPACITY).astype(np.int64),
    "all equal": lambda rng, n: np.full(n, rng.integers(1, CAPACITY)),
    "all just over half": lambda rng, n: rng.integers(CAPACITY // 2 + 1, CAPACITY // 2 + 9, n),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_lengths_are_within_half_a_percent_of_the_bound(name: str) -> None:
    for seed in range(3):
        plan = pack(OTHERS[name](np.random.default_rng(seed), 8192), CAPACITY)
        assert plan.gap <= 0.005
        if name.startswith("all"):
            assert plan.gap == 0.0


def test_where_columns_beat_best_fit_and_the_other_bounds() -> None:
    lengths = np.random.default_rng(1).choice([4100, 5461, 8000], 16384)
    plan = pack(lengths, CAPACITY)
    assert len(plan.bins) == plan.lower_bound == 5934
    assert bins_bound(np.sort(lengths)[::-1], CAPACITY, 9999) == 5885


def test_a_solution_that_rounding_overfills_is_taken_back() -> None:
    program = seqpack.planning.cutting_stock._Program([2, 3], [4, 6])
    program.uses = [2.9999999, 2.0]  # one bin of the first too many
    whole, left = program.rounded_down([4, 6])
    assert (sorted(whole), left) == ([(0, 3), (0, 3), (2, 0), (2, 0)], [0, 0])


def test_work_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """However early the generation stops, the bins are a packing and the bound holds."""
    lengths, counts = [70, 51, 34, 33, 20, 7], [30, 31, 29, 17, 40, 55]
    best, optimum = cutting_stock(lengths, counts, 120)
    assert len(best) == optimum
    for work in (0, 2000, 5000):
        monkeypatch.setattr(seqpack.planning.cutting_stock, "WORK", work)
        patterns, bound = cutting_stock(lengths, counts, 120)
        check(patterns, lengths, counts, 120)
        assert 0 < bound <= optimum <= len(patterns)
    assert cutting_stock([2**20, 2**20 - 1], [9, 9], 2**21) == ([], 0)
    assert cutting_stock([2**20, 2**21], [9, 9], 2**22)[1] == 7


@pytest.mark.parametrize(
    ("lengths", "tried"),
    [
        ([40] * 9, True),
        ([40, 40], False),
        (list(range(1, KINDS + 1)) * 3, True),
        (list(range(1, KINDS + 2)) * 3, False),
    ],
)
def test_only_few_kinds_are_tried(lengths: list[int], tried: bool) -> None:
    array: Any = -np.sort(-np.array(lengths, dtype=np.int64))
    bins, bound = small_kinds(array, np.arange(len(array)), 100)
    assert bool(bins) == bool(bound) == tried
    assert small_kinds(array[:0], array[:0], 100) == ([], 0)
