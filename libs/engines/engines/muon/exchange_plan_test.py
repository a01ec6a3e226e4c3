"""The plan of an exchange: over any way to cut matrices, each is put together once, and every piece gets its part."""

from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.muon.exchange_plan import Pair, Piece, assigned, rounds_of, shapes_of

Tables = list[list[Piece]]


@st.composite
def cut(draw: st.DrawFn) -> Tables:
    """Matrices cut into a grid each, of which ranks hold parts; some have copies."""
    ranks = draw(st.integers(1, 4))
    tables: Tables = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(1, 6))):
        edges = [sorted({0, draw(st.integers(1, 5)), draw(st.integers(6, 9))}) for _ in range(2)]
        for rows, columns in product(*(pairwise(e) for e in edges)):
            start, size = (rows[0], columns[0]), (rows[1] - rows[0], columns[1] - columns[0])
            holders = draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=ranks, unique=True))
            for place, rank in enumerate(holders):
                tables[rank].append(Piece(f"t{number % 2}", number, start, size, owned=place == 0))
    return tables


@settings(max_examples=60, deadline=None)
@given(cut(), st.integers(1, 200))
def test_every_piece_gets_its_part_of_the_whole(tables: Tables, most: int) -> None:
    shapes = shapes_of(tables)
    whole = {key: torch.rand(shape) for key, shape in shapes.items()}

    def part(piece: Piece) -> torch.Tensor:
        (row, column), (rows, columns) = piece.start, piece.size
        return whole[piece.key][row : row + rows, column : column + columns]

    plans = [rounds_of(tables, rank, most) for rank in range(len(tables))]
    assert len({len(plan) for plan in plans}) == 1
    got: set[Pair] = set()
    seen = 0
    for number in range(len(plans[0])):
        step = [plan[number] for plan in plans]
        for rank, own in enumerate(step):
            built = [torch.full(shape, torch.nan) for shape in own.shapes]
            seen += len(built)
            for source in range(len(tables)):  # in the order in which messages between two ranks travel
                sent = [one for one in step[source].sent if one.rank == rank]
                received = [one for one in own.received if one.rank == source]
                assert [(a.piece, a.matrix) for a in sent] == [(b.piece, b.matrix) for b in received]
                for message in sent:
                    piece = tables[source][message.piece]
                    (row, column), (rows, columns) = piece.start, piece.size
                    box = built[message.matrix][row : row + rows, column : column + columns]
                    assert box.isnan().all(), "two pieces for one place"
                    box.copy_(part(piece))
                back = [one for one in own.returned if one.rank == source]
                taken = [one for one in step[source].taken if one.rank == rank]
                assert [(a.piece, a.matrix) for a in back] == [(b.piece, b.matrix) for b in taken]
                got |= {(source, message.piece) for message in back}
            assert all(not one.isnan().any() for one in built)
            assert sum(one.numel() for one in built) <= most or len(built) == 1
    assert seen == len(shapes)
    assert got == {(rank, n) for rank, table in enumerate(tables) for n in range(len(table))}


def test_a_rank_that_has_all_of_a_matrix_takes_it_and_copies_share_the_work() -> None:
    tables = [[Piece("t", n, (0, 0), (4, 4), owned=rank == 0) for n in range(6)] for rank in range(3)]
    assert [one.rank for one in assigned(tables)] == [0, 1, 2, 0, 1, 2]
    assert all(source == (one.rank, n) for n, one in enumerate(assigned(tables)) for source in one.sources)


def test_pieces_that_do_not_fill_a_matrix_are_an_error() -> None:
    tables = [[Piece("t", 0, (2, 0), (2, 4), True)], [Piece("t", 0, (0, 0), (2, 3), True)]]
    with pytest.raises(RuntimeError, match=r"the pieces that ranks own of t \(0\) do not fill it"):
        list(assigned(tables))
