import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpack.balancing import balance


@given(st.lists(st.floats(0, 1e6), max_size=60), st.integers(1, 9), st.booleans())
def test_every_index_once(costs: list[float], parts: int, equal_size: bool) -> None:
    plan = balance(costs, parts, equal_size)
    assert len(plan.parts) == parts
    assert sorted(i for part in plan.parts for i in part) == list(range(len(costs)))
    assert max(plan.loads) >= plan.lower_bound * (1 - 1e-9)
    counts = [len(part) for part in plan.parts]
    assert not equal_size or max(counts) - min(counts) <= 1
    assert plan == balance(costs, parts, equal_size)


@pytest.mark.parametrize(
    ("costs", "parts", "words"),
    [
        ([1, float("nan")], 2, r"costs\[1\] must be finite and not negative, got nan"),
        ([1, float("inf")], 2, r"costs\[1\] must be finite"),
        ([-1], 2, r"costs\[0\] must be finite and not negative, got -1"),
        (["a"], 2, r"costs\[0\] must be a number, got 'a'"),
        ([1], 0, "num_parts must be a positive integer, got 0"),
    ],
)
def test_bad_input_is_named(costs, parts, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        balance(costs, parts)
