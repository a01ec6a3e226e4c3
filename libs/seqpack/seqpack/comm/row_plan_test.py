"""Who sends which row to whom: each row comes once to each rank that needs it, and nothing else travels."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqpack.comm.row_plan import RowPlan


@st.composite
def plans(draw: st.DrawFn) -> RowPlan:
    world, rows = draw(st.integers(1, 6)), draw(st.integers(0, 12))
    holders = draw(st.lists(st.integers(0, world - 1), min_size=rows, max_size=rows))
    sizes = draw(st.lists(st.integers(0, 100), min_size=rows, max_size=rows))
    needs = st.sets(st.integers(0, rows - 1)) if rows else st.just(set())
    return RowPlan.of(holders, sizes, draw(st.lists(needs, min_size=world, max_size=world)))


@given(plans())
def test_each_row_arrives_once_where_it_is_needed_and_nothing_else_travels(plan: RowPlan) -> None:
    world = range(len(plan.wanted))
    for rank in world:
        arrived = Counter(row for rows in plan.receives(rank) for row in rows)
        assert set(arrived.values()) <= {1}
        assert arrived.keys() == {row for row in plan.wanted[rank] if plan.holders[row] != rank}
        for other in world:
            assert plan.sends(other)[rank] == plan.receives(rank)[other]
            assert all(plan.holders[row] == other for row in plan.sends(other)[rank])
        assert plan.sends(rank)[rank] == []


@given(plans())
def test_bytes_that_are_sent_are_those_that_arrive(plan: RowPlan) -> None:
    world = range(len(plan.wanted))
    assert sum(map(plan.sent_bytes, world)) == sum(map(plan.received_bytes, world)) == plan.total_bytes
    needed_elsewhere = sum(plan.sizes[r] for rank in world for r in plan.wanted[rank] if plan.holders[r] != rank)
    assert plan.total_bytes == needed_elsewhere


def test_bytes_grow_with_the_data_and_not_with_the_ranks() -> None:
    """Each row is trained by one rank: on 4 ranks or 256 no more than all rows travel, where a gather would send them
    to every rank; twice the rows are twice the bytes."""
    generator, totals = random.Random(0), {}
    for world in (4, 16, 64, 256):
        for count in (512, 1024):
            holders = [row % world for row in range(count)]
            trained_by = [generator.randrange(world) for _ in range(count)]
            wanted = [{row for row in range(count) if trained_by[row] == rank} for rank in range(world)]
            totals[world, count] = RowPlan.of(holders, [2**18] * count, wanted).total_bytes
    for (_, count), total in totals.items():
        assert 0.7 * count * 2**18 <= total <= count * 2**18


@pytest.mark.parametrize(
    ("holders", "sizes", "wanted", "message"),
    [
        ([0], [1, 2], [[0]], "1 rows have a holder, and 2 a size"),
        ([1], [1], [[0]], "rows lie on ranks 0 to 0"),
        ([0], [-1], [[0]], "0 bytes or more"),
        ([0], [1], [[1]], "none of the 1"),
    ],
)
def test_what_does_not_fit_is_refused(
    holders: list[int], sizes: list[int], wanted: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RowPlan.of(holders, sizes, wanted)
