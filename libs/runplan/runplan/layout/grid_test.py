import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from engines import ParallelLayout
from runplan.layout.grid import DENSE, EXPERT, Axis, Grid, make_grid

SIZE = st.sampled_from([1, 2, 3, 4, 8])


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    tp, cp, dp, pp = draw(st.tuples(SIZE, SIZE, SIZE, st.sampled_from([1, 2, 3])))
    stage = tp * cp * dp
    assume(stage * pp <= 256)
    ep = draw(st.sampled_from([size for size in range(1, stage + 1) if stage % size == 0]))
    etp = draw(st.sampled_from([size for size in range(1, stage // ep + 1) if stage // ep % size == 0]))
    return make_grid(stage * pp, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp)


@given(grids())
def test_every_rank_is_in_exactly_one_cell(grid: Grid) -> None:
    for axes in (DENSE, EXPERT):
        cells = {tuple(grid.cell(rank, axes).items()) for rank in range(grid.ranks)}
        assert len(cells) == grid.ranks
        for cell in cells:
            assert all(0 <= place < grid.size(axis) for axis, place in cell)


@given(grids(), st.sampled_from([*DENSE, *EXPERT]))
def test_groups_of_an_axis_part_the_ranks_and_differ_along_it_alone(grid: Grid, axis: Axis) -> None:
    groups = grid.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.ranks))
    axes = DENSE if axis in DENSE else EXPERT
    for group in groups:
        assert len(group) == grid.size(axis)
        cells = [grid.cell(rank, axes) for rank in group]
        assert [cell[axis] for cell in cells] == list(range(grid.size(axis)))
        others = {tuple(value for name, value in cell.items() if name != axis) for cell in cells}
        assert len(others) == 1


@given(grids())
def test_ranks_stand_where_the_engines_put_them(grid: Grid) -> None:
    layout = ParallelLayout(dp=grid.dp, cp=grid.cp, tp=grid.tp, pp=grid.pp, ep=grid.ep)
    assert layout.world_size == grid.ranks
    for rank in range(grid.ranks):
        assert layout.coordinates(rank)._asdict() == grid.cell(rank)


@given(grids())
def test_both_grids_agree_on_the_pipeline_stage(grid: Grid) -> None:
    for rank in range(grid.ranks):
        assert grid.cell(rank, DENSE)["pp"] == grid.cell(rank, EXPERT)["pp"]


def test_tensor_parallel_ranks_are_neighbours() -> None:
    grid = make_grid(32, tp=2, pp=2, ep=8)
    assert grid == Grid(tp=2, cp=1, dp=8, pp=2, etp=1, ep=8, edp=2)
    assert grid.groups("tp")[0] == (0, 1)
    assert grid.groups("pp")[0] == (0, 16)
    assert grid.groups("ep")[0] == tuple(range(8))


@pytest.mark.parametrize(
    ("ranks", "sizes", "fix"),
    [
        (30, {"tp": 4}, "use 28 or 32 ranks"),
        (30, {"pp": 4}, "use 28 or 32 ranks"),
        (4, {"tp": 8}, "use 8 ranks"),
        (32, {"pp": 2, "ep": 12}, r"lower ep to one of \[1, 2, 4, 8, 16\]"),
        (32, {"pp": 2, "ep": 32}, r"lower ep to one of \[1, 2, 4, 8, 16\]"),
    ],
)
def test_sizes_that_do_not_divide_come_with_those_that_do(ranks: int, sizes: dict[str, int], fix: str) -> None:
    with pytest.raises(ValueError, match=fix):
        make_grid(ranks, **sizes)
