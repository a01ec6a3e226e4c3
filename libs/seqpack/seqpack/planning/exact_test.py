from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpack.planning.exact import least_maximum, min_bins


@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(20, 45))
def test_fewest_bins_against_every_assignment(lengths: list[int], capacity: int) -> None:
    best = len(lengths)
    for homes in product(range(len(lengths)), repeat=len(lengths)):
        loads = [sum(n for n, h in zip(lengths, homes, strict=True) if h == b) for b in set(homes)]
        if max(loads) <= capacity:
            best = min(best, len(loads))
    assert min_bins(lengths, capacity) == best


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(1, 4), st.booleans())
def test_least_maximum_against_every_assignment(costs: list[int], parts: int, equal_size: bool) -> None:
    best = float("inf")
    for homes in product(range(parts), repeat=len(costs)):
        counts = [homes.count(p) for p in range(parts)]
        if not equal_size or max(counts) - min(counts) <= 1:
            loads = [sum(c for c, h in zip(costs, homes, strict=True) if h == p) for p in range(parts)]
            best = min(best, max(loads))
    assert least_maximum(costs, parts, equal_size) == best


def test_too_many_items_are_refused() -> None:
    with pytest.raises(ValueError, match="15 items are too many"):
        min_bins([1] * 15, 3)
    with pytest.raises(ValueError, match="15 items are too many"):
        least_maximum([1] * 15, 3)
