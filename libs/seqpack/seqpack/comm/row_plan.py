"""The plan of who sends which row to whom: a pure function of where rows are and where they are needed."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class RowPlan:
    """Row i has sizes[i] bytes and lies on rank holders[i]; rank r needs the rows wanted[r]. The same on every rank.

    A row goes from its holder straight to each rank that needs it, once; what a rank has already goes nowhere.

    Raises:
        ValueError: a holder is no rank, a row does not exist, or a size is below 0.
    """

    holders: tuple[int, ...]
    sizes: tuple[int, ...]
    wanted: tuple[frozenset[int], ...]

    @classmethod
    def of(cls, holders: Sequence[int], sizes: Sequence[int], wanted: Sequence[Collection[int]]) -> "RowPlan":
        """Return the plan of rows with these holders and bytes, by what each rank needs."""
        return cls(tuple(holders), tuple(sizes), tuple(frozenset(rows) for rows in wanted))

    def __post_init__(self) -> None:
        if len(self.holders) != len(self.sizes):
            raise ValueError(f"{len(self.holders)} rows have a holder, and {len(self.sizes)} a size")
        if any(not 0 <= holder < len(self.wanted) for holder in self.holders) or min(self.sizes, default=0) < 0:
            raise ValueError(f"rows lie on ranks 0 to {len(self.wanted) - 1} and have 0 bytes or more")
        if any(not 0 <= row < len(self.holders) for rows in self.wanted for row in rows):
            raise ValueError(f"a rank needs a row that is none of the {len(self.holders)}")

    def sends(self, rank: int) -> list[list[int]]:
        """Return the rows that a rank sends to each rank, in ascending order."""
        return [self._moves.get((rank, other), []) for other in range(len(self.wanted))]

    def receives(self, rank: int) -> list[list[int]]:
        """Return the rows that a rank gets from each rank, in ascending order."""
        return [self._moves.get((other, rank), []) for other in range(len(self.wanted))]

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes of rows that a rank sends."""
        return sum(self.sizes[row] for rows in self.sends(rank) for row in rows)

    def received_bytes(self, rank: int) -> int:
        """Return the bytes of rows that a rank gets."""
        return sum(self.sizes[row] for rows in self.receives(rank) for row in rows)

    @property
    def total_bytes(self) -> int:
        """The bytes of rows that travel between all ranks."""
        return sum(self.sizes[row] for rows in self._moves.values() for row in rows)

    @cached_property
    def _moves(self) -> dict[tuple[int, int], list[int]]:
        """The rows that travel, ascending, by the ranks from and to which."""
        moves: dict[tuple[int, int], list[int]] = {}
        for rank, rows in enumerate(self.wanted):
            for row in sorted(rows):
                if self.holders[row] != rank:
                    moves.setdefault((self.holders[row], rank), []).append(row)
        return moves
