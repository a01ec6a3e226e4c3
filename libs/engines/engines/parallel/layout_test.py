"""Layouts: rank numbers are Megatron's, planes split the world, sizes that do not fit are refused."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.parallel.layout import Coordinates, ParallelLayout

sizes = st.integers(1, 4)
layouts = st.builds(ParallelLayout, dp=sizes, cp=sizes, tp=sizes, pp=sizes)


@given(layouts)
def test_ranks_and_coordinates(layout: ParallelLayout) -> None:
    ranks = range(layout.world_size)
    places = [layout.coordinates(rank) for rank in ranks]
    assert [layout.rank_of(place) for place in places] == list(ranks)
    # pp, dp, cp, tp in the order of significance: counting up through the world is counting up through the places.
    assert places == sorted(places)
    assert len(set(places)) == layout.world_size
    with pytest.raises(ValueError, match="is not one of"):
        layout.coordinates(layout.world_size)


@given(layouts)
def test_plan_planes_and_pipelines_split_the_world(layout: ParallelLayout) -> None:
    ranks = range(layout.world_size)
    for of, size in ((layout.plan_ranks, layout.plan_size), (layout.pipeline_ranks, layout.pp)):
        planes = {of(rank) for rank in ranks}
        assert sorted(rank for plane in planes for rank in plane) == list(ranks)
        assert {len(plane) for plane in planes} == {size}
        assert all(rank in of(rank) for rank in ranks)
    for rank in ranks:
        assert layout.plan_ranks(rank)[layout.plan_index(rank)] == rank
        assert layout.pipeline_ranks(rank)[layout.coordinates(rank).pp] == rank
        assert layout.is_last_stage(rank) == (layout.pipeline_ranks(rank)[-1] == rank)


def test_megatrons_order_by_hand() -> None:
    """tp 2, cp 1, dp 2, pp 2: the table of Megatron's parallel_state documentation for 8 ranks."""
    layout = ParallelLayout(dp=2, tp=2, pp=2)
    assert {layout.plan_ranks(rank) for rank in range(8)} == {(0, 2), (1, 3), (4, 6), (5, 7)}
    assert {layout.pipeline_ranks(rank) for rank in range(8)} == {(0, 4), (1, 5), (2, 6), (3, 7)}
    assert layout.coordinates(6) == Coordinates(pp=1, dp=1, cp=0, tp=0)


@given(layouts)
def test_of_world_leaves_dp(layout: ParallelLayout) -> None:
    made = ParallelLayout.of_world(layout.world_size, cp=layout.cp, tp=layout.tp, pp=layout.pp)
    assert made == layout


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParallelLayout(dp=0), "dp must be an integer of at least 1, got 0"),
        (lambda: ParallelLayout(tp=2.0), "tp must be an integer of at least 1, got 2.0"),  # type: ignore[arg-type]
        (lambda: ParallelLayout(pp=True), "pp must be an integer"),
        (lambda: ParallelLayout(dp=2, tp=2, ep=3), "ep=3 must divide dp \\* cp \\* tp = 4"),
        (lambda: ParallelLayout(dp=2, tp=2, ep=2, etp=4), "ep \\* etp = 2 \\* 4 must divide dp"),
        (lambda: ParallelLayout.of_world(6, tp=4), "need a multiple of 4 ranks, this run has 6"),
        (lambda: ParallelLayout.of_world(0), "this run has 0"),
        (lambda: ParallelLayout(dp=2).check_world(3), "is for 2 ranks, this run has 3"),
    ],
)
def test_sizes_that_do_not_fit(make: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_experts_fit_where_they_divide_a_stage() -> None:
    assert ParallelLayout(dp=2, tp=2, ep=4).ep == 4
