import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpack.planning.bounds import volume_bound
from seqpack.planning.exact_fill import LEVELS, SLACK, fill_bins

CAPACITY = 16384


def run(lengths: list[int], capacity: int) -> tuple[list[tuple[int, ...]], list[int]]:
    array = np.array(lengths, dtype=np.int64)
    order = np.argsort(-array, kind="stable")
    bins, left = fill_bins(array[order], order, capacity)
    return bins, order[left].tolist()


@given(
    st.one_of(
        st.lists(st.integers(1, 120), max_size=60),
        st.lists(st.integers(20, 60), max_size=90),
        st.lists(st.sampled_from([24, 30, 40, 48, 60]), max_size=90),
        st.lists(st.just(40), max_size=40),
    ),
    st.sampled_from([120, 125, 977, 120 * LEVELS]),
    st.integers(1, 3),
)
def test_every_item_once_and_bins_within_the_slack(lengths: list[int], capacity: int, scale: int) -> None:
    lengths = [min(capacity, length * scale * max(1, capacity // 400)) for length in lengths]
    bins, left = run(lengths, capacity)
    assert sorted([item for items in bins for item in items] + left) == list(range(len(lengths)))
    for items in bins:
        load = sum(lengths[item] for item in items)
        level = -(-capacity // LEVELS) if capacity > LEVELS else 1
        assert load <= capacity
        # A pair leaves what it leaves; a bin of more misses the slack and what its lengths were rounded up by.
        assert len(items) == 2 or 2 * load > capacity - level
        assert len(items) <= 2 or load > capacity - (SLACK + len(items)) * level
    assert run(lengths, capacity) == (bins, left)


@pytest.mark.parametrize(("low", "high"), [(0.15, 0.35), (0.2, 0.4), (0.1, 0.3), (1 / 6, 0.5)])
def test_hardly_more_bins_than_tokens_need(low: float, high: float) -> None:
    lengths = np.random.default_rng(0).integers(int(low * CAPACITY), int(high * CAPACITY), 8192)
    bins, left = run(lengths.tolist(), CAPACITY)
    assert len(left) < 200
    assert len(bins) <= 1.005 * volume_bound(lengths, CAPACITY)


def test_gives_up_where_nothing_adds_up() -> None:
    assert run([31] * 100, 120) == ([], list(range(100)))
    assert run([70] * 100, 120) == ([(i,) for i in range(100)], [])
    assert run([], 8) == ([], [])
    assert run([40] * 3, 120) == ([(0, 1, 2)], [])
    assert run([40] * 2, 120)[1] == [0, 1]
