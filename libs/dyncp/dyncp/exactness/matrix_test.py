"""The exactness matrix in float64 over three gloo processes, started once for all cells; four: matrix_four_test."""

from collections.abc import Sequence

import pytest

from dyncp.exactness.matrix import MIXES, TOLERANCE, Cell, Verdict, cells, markdown, must_refuse, run_sizes
from dyncp.exactness.processes import run_world

SIZES = (1, 2, 3)
Found = list[dict[int, list[Verdict]]]
"""Of every rank, the verdicts of each group size it took part in."""


def run_cells(sizes: Sequence[int]) -> Found:
    ranks = run_world(max(sizes), run_sizes, sizes)
    return [{size: [Verdict(**row) for row in rows] for size, rows in rank.items()} for rank in ranks]


@pytest.fixture(scope="module")
def found() -> Found:
    return run_cells(SIZES)


def assert_exact(found: Found, cp_size: int) -> None:
    assert len(list(cells())) == 95
    for rank, by_size in enumerate(found):
        assert (cp_size in by_size) == (rank < cp_size)
        if rank >= cp_size:
            continue
        for cell, verdict in zip(cells(), by_size[cp_size], strict=True):
            assert bool(verdict.refused) == must_refuse(cell, cp_size), (cell, verdict)
            assert verdict.output_error <= TOLERANCE, (cell, verdict)
            assert verdict.gradient_error <= TOLERANCE, (cell, verdict)


@pytest.mark.parametrize("cp_size", SIZES)
def test_every_cell_is_exact_or_refused(found: Found, cp_size: int) -> None:
    assert_exact(found, cp_size)


def test_refusals_give_their_reason_when_planning_and_when_running(found: Found) -> None:
    reasons = {v.refused for verdicts in found[0].values() for v in verdicts if v.refused}
    for reason in reasons:
        planned, _, run = reason.partition(" | ")
        assert "zigzag" in planned or "Ulysses" in planned
        assert "zigzag" in run or "Ulysses" in run


def test_the_refused_cells_are_the_expected_ones() -> None:
    assert must_refuse(Cell("hybrid", "zigzag", "ring", "mixed"), 1)
    assert must_refuse(Cell("attention", "contiguous", "ulysses", "mixed", other=True), 3)
    assert not must_refuse(Cell("attention", "zigzag", "ulysses", "mixed"), 3)
    assert len(MIXES) == 5


def test_the_table_has_a_line_for_each_way(found: Found) -> None:
    text = markdown([verdict for verdicts in found[0].values() for verdict in verdicts])
    assert text.count("\n") == 1 + 3 * 2 * 3 + 3 + 1
    assert "| hybrid | zigzag | ring | refused |" in text
