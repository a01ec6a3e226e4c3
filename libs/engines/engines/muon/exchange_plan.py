"""Which rank orthogonalizes which matrix, and what the ranks send each other for it: a pure plan.

Ranks hold boxes of matrices: rows of a shard (FSDP2), rows of some heads or columns (Megatron's tensor parallelism),
any range of elements (its distributed optimizer), all of some experts. Each matrix is put together on one rank: on one
that has all of it where there are such, on the least loaded of these; the result goes back to all that hold a part.

Matrices are sent in rounds of at most `most` elements a rank (or one matrix), so that memory stays bounded.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Key = tuple[str, int]
"""A tensor of the transformers model, and the number of the matrix in it (0 but for stacked experts)."""
Pair = tuple[int, int]

ROUND = 2**25
"""Elements that a rank orthogonalizes at once: 64 MiB in bfloat16."""


@dataclass(frozen=True)
class Piece:
    """A box of a matrix that a rank holds. `owned`: exactly one of the ranks that hold the same values owns it."""

    tensor: str
    number: int
    start: Pair
    size: Pair
    owned: bool

    @property
    def key(self) -> Key:
        """The matrix that it is of."""
        return self.tensor, self.number

    @property
    def elements(self) -> int:
        """Number of its elements."""
        return math.prod(self.size)


class Message(NamedTuple):
    """A piece on its way: `rank` is where it goes or comes from, `piece` its number there or here, and `matrix` its
    place among those that are orthogonalized in the round."""

    rank: int
    piece: int
    matrix: int


@dataclass
class Round:
    """A rank's part in a round; every list is in the order in which its messages travel."""

    shapes: list[Pair] = field(default_factory=list)
    """Shapes of the matrices that this rank orthogonalizes."""
    sent: list[Message] = field(default_factory=list)
    """This rank's own pieces to the ranks that orthogonalize, in order of these."""
    received: list[Message] = field(default_factory=list)
    """Pieces of others to this rank, in order of these."""
    returned: list[Message] = field(default_factory=list)
    """Pieces of results from this rank."""
    taken: list[Message] = field(default_factory=list)
    """Pieces of results to this rank: its own pieces."""


@dataclass(frozen=True)
class Matrix:
    """A matrix with the rank and the round of its orthogonalization. `sources` fill it, `targets` are all its pieces:
    (rank, number of the piece in the rank's table)."""

    shape: Pair
    rank: int
    round: int
    sources: tuple[Pair, ...]
    targets: tuple[Pair, ...]


def rounds_of(tables: Sequence[Sequence[Piece]], rank: int, most: int = ROUND) -> list[Round]:
    """Return what `rank` does; `tables`: the pieces of each rank, on all ranks alike."""
    matrices = [*assigned(tables, most)]
    rounds = [Round() for _ in range(1 + max((one.round for one in matrices), default=-1))]
    places: dict[tuple[int, int], int] = {}
    for one in matrices:
        place = places.get((one.rank, one.round), 0)
        places[one.rank, one.round] = place + 1
        own = rounds[one.round]
        if one.rank == rank:
            own.shapes.append(one.shape)
        for here, there in ((one.sources, (own.sent, own.received)), (one.targets, (own.taken, own.returned))):
            for holder, piece in here:
                if holder == rank:
                    there[0].append(Message(one.rank, piece, place))
                if one.rank == rank:
                    there[1].append(Message(holder, piece, place))
    for one_round in rounds:
        for messages in (one_round.sent, one_round.received, one_round.returned, one_round.taken):
            messages.sort(key=lambda message: message.rank)  # stable: the order of matrices stays
    return rounds


def assigned(tables: Sequence[Sequence[Piece]], most: int = ROUND) -> Iterator[Matrix]:
    """Yield every matrix; RuntimeError where pieces do not fill one."""
    shapes, held = shapes_of(tables), dict[Key, list[Pair]]()
    for holder, table in enumerate(tables):
        for number, piece in enumerate(table):
            held.setdefault(piece.key, []).append((holder, number))
    load, filled, current = [0.0] * len(tables), [0] * len(tables), [0] * len(tables)
    for key, targets in held.items():
        pieces = {pair: tables[pair[0]][pair[1]] for pair in targets}
        shape = shapes[key]
        elements = math.prod(shape)
        having = [*dict.fromkeys(holder for holder, _ in targets)]
        held_by = dict.fromkeys(having, 0)
        for (holder, _), piece in pieces.items():
            held_by[holder] += piece.elements
        whole = [one for one, count in held_by.items() if count == elements]
        rank = min(whole or having, key=lambda one: (load[one], one))
        sources = tuple(pair for pair, p in pieces.items() if (pair[0] == rank if whole else p.owned))
        if sum(pieces[pair].elements for pair in sources) != elements:
            raise RuntimeError(f"the pieces that ranks own of {key[0]} ({key[1]}) do not fill it: {shape}")
        load[rank] += elements * min(shape)
        if filled[rank] and filled[rank] + elements > most:
            filled[rank], current[rank] = 0, current[rank] + 1
        filled[rank] += elements
        yield Matrix(shape, rank, current[rank], sources, tuple(targets))


def shapes_of(tables: Sequence[Sequence[Piece]]) -> dict[Key, Pair]:
    """Return the shape of every matrix: the end of its last piece."""
    shapes: dict[Key, Pair] = {}
    for table in tables:
        for piece in table:
            rows, columns = shapes.get(piece.key, (0, 0))
            shapes[piece.key] = max(rows, piece.start[0] + piece.size[0]), max(columns, piece.start[1] + piece.size[1])
    return shapes
