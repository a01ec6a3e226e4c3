import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpack.packing import pack


@given(st.lists(st.integers(1, 100), max_size=60), st.integers(100, 300))
def test_every_index_once_and_never_over_capacity(lengths: list[int], capacity: int) -> None:
    plan = pack(lengths, capacity)
    assert sorted(i for items in plan.bins for i in items) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in items) <= capacity for items in plan.bins)
    assert all(plan.bins)
    assert plan.loads == tuple(sum(lengths[i] for i in items) for items in plan.bins)
    assert plan.lower_bound <= len(plan.bins)
    assert plan == pack(lengths, capacity)


@pytest.mark.parametrize(
    ("lengths", "capacity", "words"),
    [
        ([3, -1], 8, r"lengths\[1\] must be at least 1, got -1"),
        ([3, 0], 8, r"lengths\[1\] must be at least 1, got 0"),
        ([3, 2.0], 8, r"lengths\[1\] must be an integer, got 2.0"),
        ([3, True], 8, r"lengths\[1\] must be an integer, got True"),
        ([3, "a"], 8, r"lengths\[1\] must be an integer, got 'a'"),
        ([3, 9], 8, r"lengths\[1\] = 9 does not fit in 8"),
        ([3], 0, "capacity must be a positive integer, got 0"),
        ([3], 2.5, "capacity must be a positive integer, got 2.5"),
        ("33", 8, "lengths must be a sequence of numbers, got str"),
        (3, 8, "lengths must be a sequence of numbers, got int"),
    ],
)
def test_bad_input_is_named(lengths, capacity, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        pack(lengths, capacity)
