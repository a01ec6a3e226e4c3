from fractions import Fraction
from math import ceil, floor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpack.planning.bounds import (
    best_slope_bound,
    bins_bound,
    max_part_bound,
    rounding_bound,
    slope_bound,
    threshold_bound,
    volume_bound,
)
from seqpack.planning.exact import least_maximum, min_bins

slopes = st.integers(1, 40).flatmap(lambda q: st.tuples(st.integers(q, 7 * q), st.just(q)))


def descending(lengths: list[int]) -> np.ndarray:
    return np.array(sorted(lengths, reverse=True), dtype=np.int64)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(60, 130), st.integers(1, 12), slopes)
def test_every_bound_is_below_the_optimum(
    given_lengths: list[int], capacity: int, k: int, slope: tuple[int, int]
) -> None:
    optimum = min_bins(given_lengths, capacity)
    array = descending(given_lengths)
    p, q = slope
    assert volume_bound(array, capacity) <= optimum
    assert threshold_bound(array, capacity) <= optimum
    lengths, counts = np.unique(array, return_counts=True)
    assert rounding_bound(lengths, counts, capacity, k) <= optimum
    assert slope_bound(lengths, counts, capacity, p, q) <= optimum
    assert best_slope_bound(lengths, counts, capacity) <= optimum
    assert bins_bound(array, capacity, len(given_lengths)) <= optimum


def test_each_bound_sees_what_the_others_do_not() -> None:
    # Ten lengths just over half: the volume says six bins, the threshold ten.
    assert (volume_bound(descending([51] * 10), 100), threshold_bound(descending([51] * 10), 100)) == (6, 10)
    # Just over a third, two fit in a bin: only rounding with k = 2 sees five bins.
    third = descending([34] * 10)
    assert (
        volume_bound(third, 100),
        threshold_bound(third, 100),
        rounding_bound(third[:1], np.array([10]), 100, 2),
    ) == (4, 4, 5)
    # Around a third of the capacity some bins hold two and some three: only a slope there sees that 3 will not do.
    lengths, counts = np.unique([20, 30, 30, 35, 35, 35, 36, 36, 38], return_counts=True)
    array = np.repeat(lengths, counts)[::-1]
    others = [rounding_bound(lengths, counts, 100, k) for k in range(2, 12)]
    assert max(volume_bound(array, 100), threshold_bound(array, 100), *others) == 3
    assert best_slope_bound(lengths, counts, 100) == min_bins(array.tolist(), 100) == bins_bound(array, 100, 9) == 4
    # A pair and its leftovers: 60 + 40 fit, 60 + 41 do not.
    assert threshold_bound(descending([60, 60, 41, 41]), 100) == 3


def test_threshold_bound_equals_its_definition() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        capacity = int(rng.integers(5, 40))
        lengths = rng.integers(1, capacity + 1, size=rng.integers(1, 30)).tolist()
        best = 0
        for k in range(capacity // 2 + 1):
            alone = [n for n in lengths if n > capacity - k]
            pairs = [n for n in lengths if capacity - k >= n > capacity / 2]
            fillers = [n for n in lengths if capacity / 2 >= n >= k]
            rest = sum(fillers) - (len(pairs) * capacity - sum(pairs))
            best = max(best, len(alone) + len(pairs) + max(0, -(-rest // capacity)))
        assert threshold_bound(descending(lengths), capacity) == best


@given(st.lists(st.integers(1, 60), min_size=1, max_size=9), st.integers(60, 130), st.integers(1, 12), slopes)
def test_dual_feasible_functions_equal_their_formulas(
    given_lengths: list[int], capacity: int, k: int, slope: tuple[int, int]
) -> None:
    lengths, counts = np.unique(given_lengths, return_counts=True)
    shares = [Fraction(length, capacity) for length in given_lengths]
    rounded = [x if ((k + 1) * x).denominator == 1 else Fraction(floor((k + 1) * x), k) for x in shares]
    assert rounding_bound(lengths, counts, capacity, k) == ceil(sum(rounded))
    z = Fraction(*slope)
    sloped = [floor(z * x) + max(Fraction(0), z * x % 1 - z % 1) / (1 - z % 1) for x in shares]
    assert slope_bound(lengths, counts, capacity, *slope) == ceil(sum(sloped) / floor(z))


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(1, 4), st.booleans())
def test_heaviest_part_bound_is_below_the_optimum(costs: list[int], parts: int, equal_size: bool) -> None:
    array = descending(costs).astype(np.float64)
    assert max_part_bound(array, parts, equal_size) <= least_maximum(costs, parts, equal_size) + 1e-9


@pytest.mark.parametrize(
    ("costs", "parts", "equal_size", "bound"),
    [
        ([], 3, False, 0.0),
        ([9, 1, 1], 3, False, 9.0),  # the largest cost
        ([5, 5, 5, 5], 3, False, 10.0),  # four of one cost over three parts
        ([4, 4, 4], 2, False, 8.0),
        ([9, 1, 1, 1], 2, True, 10.0),  # the largest cost is not alone
        ([9, 1, 1, 1], 2, False, 9.0),
        ([9, 1, 1], 2, True, 9.0),  # the larger part need not be that of the largest cost
    ],
)
def test_heaviest_part_bound(costs: list[float], parts: int, equal_size: bool, bound: float) -> None:
    assert max_part_bound(np.array(costs, dtype=np.float64), parts, equal_size) == bound
