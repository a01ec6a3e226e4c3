"""Routed experts as data: bytes and tensors are the same, and what is known is never lost."""

import json
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.experts import RoutedExperts, merged

TABLES = st.lists(st.one_of(st.none(), st.lists(st.integers(0, 32767), min_size=6, max_size=6)), max_size=8)


def table(rows: Sequence[list[int] | None]) -> torch.Tensor:
    """i16[tokens, 2, 3]; None is a token whose experts are unknown."""
    return torch.tensor([[-1] * 6 if row is None else row for row in rows], dtype=torch.int16).view(-1, 2, 3)


@given(TABLES, TABLES, st.integers(0, 12))
def test_over_takes_the_first_known_and_resized_cuts_or_lengthens(
    left: list[list[int] | None], right: list[list[int] | None], size: int
) -> None:
    first, second = RoutedExperts.of(table(left)), RoutedExperts.of(table(right))
    assert torch.equal(first.tensor(), table(left))
    assert (len(first), hash(first)) == (len(left), hash(RoutedExperts.of(table(left))))
    assert RoutedExperts.read(json.loads(json.dumps(first.plain()))) == first
    rows = [
        left[i] if i < len(left) and left[i] is not None else right[i] if i < len(right) else None
        for i in range(max(len(left), len(right)))
    ]
    assert torch.equal(first.over(second).tensor(), table(rows))
    assert torch.equal(first.resized(size).tensor(), table((left + [None] * size)[:size]))
    assert merged(None, first) == merged(first, None) == first


def test_what_is_no_table_is_refused() -> None:
    for wrong in (torch.zeros(3, 2), torch.zeros(3, 2, 2), torch.full((1, 1, 1), 40000)):
        with pytest.raises(ValueError, match=r"whole numbers|beyond"):
            RoutedExperts.of(wrong)
    with pytest.raises(ValueError, match="no whole number of tokens"):
        RoutedExperts(2, 3, b"12345")
    with pytest.raises(ValueError, match="at least 1"):
        RoutedExperts(0, 3, b"")
    with pytest.raises(ValueError, match="of two models"):
        RoutedExperts(2, 3, b"").over(RoutedExperts(1, 3, b""))
