"""The question of one plan, with everything that the searches ask for computed once; and what they answer with."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dyncp.planning.cost import Coefficients, CostModel
from dyncp.planning.group_sizes import interval_starts, tried_sizes
from dyncp.planning.sizes import Layout, ceil_div, group_room, sequence_align
from dyncp.planning.tight_packing import completed_bins, tight_bins
from seqpack.planning.packing import pack

Bins = tuple[tuple[int, ...], ...]

SMALL_COUNT = 64
"""Up to so many sequences are packed with every choice of them in view, and improved by moves and swaps."""
LARGE_COUNT = 2048
"""More sequences than this are planned with fewer attempts."""


@dataclass(slots=True, eq=False)
class Bin:
    """A group in the making: `size` ranks, `room` tokens left in all of it, `seconds` so far without the base."""

    size: int
    room: int
    seconds: float = 0.0
    samples: list[int] = field(default_factory=list)


class CandidatePlan(NamedTuple):
    """One candidate: the bins of every step (idle ranks not listed), and the seconds of each step."""

    steps: list[list[Bin]]
    seconds: list[float]
    name: str

    @property
    def total(self) -> float:
        """Predicted seconds of all steps."""
        return sum(self.seconds)


class Problem:
    """Lengths, sizes and coefficients.

    lengths: i64[n]. table: the coefficients of every allowed group size, ascending; `sizes` are those that searches
    try (`planning/group_sizes.py`; all of them up to 64 ranks). Sequences count as padded by the layout, and groups
    have the room that is left under the cap when every rank's tokens are a multiple of `align`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        world_size: int,
        cap: int,
        layout: Layout,
        align: int,
        cost: CostModel,
        table: dict[int, Coefficients],
    ) -> None:
        self.world_size, self.cap, self.layout, self.align = world_size, cap, layout, align
        self.table = table
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.pairs = cost.pairs(self.lengths)
        self.order: list[int] = np.argsort(-self.lengths, kind="stable").tolist()
        self._columns: dict[int, tuple[list[int], list[float]]] = {}
        self._packed: dict[tuple[int, tuple[int, ...]], Bins] = {}
        # Tokens a rank has room for, alone and in any group of several.
        self._room_alone, self._room_each = group_room(1, cap, layout, align), group_room(2, cap, layout, align) // 2

    def columns(self, size: int) -> tuple[list[int], list[float]]:
        """Return (tokens, seconds) of every sequence in a group of this size; tokens include the layout's padding."""
        if size not in self._columns:
            tokens, seconds = self.column_arrays(size)
            self._columns[size] = tokens.tolist(), seconds.tolist()
        return self._columns[size]

    def column_arrays(self, size: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return `columns` as arrays."""
        each, factors = sequence_align(size, self.layout), self.table[size]
        return ceil_div_array(self.lengths, each) * each, factors.token * self.lengths + factors.pair * self.pairs

    def room(self, size: int) -> int:
        """Return the tokens that a group of this size can hold."""
        return self._room_alone if size == 1 else self._room_each * size

    @cached_property
    def allowed(self) -> NDArray[np.int64]:
        """The sizes that a group can have, ascending, i64[allowed]."""
        return np.array(list(self.table), dtype=np.int64)

    @cached_property
    def sizes(self) -> list[int]:
        """Sizes that searches try, ascending."""
        return tried_sizes(self.allowed, self.smallest_sizes, self.world_size)

    @cached_property
    def size_array(self) -> NDArray[np.int64]:
        """The sizes that searches try, i64[sizes]."""
        return np.array(self.sizes, dtype=np.int64)

    @cached_property
    def rooms(self) -> NDArray[np.int64]:
        """The tokens that a group of each size can hold, i64[sizes]."""
        return self.rooms_of(self.size_array)

    def rooms_of(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens that groups of these sizes can hold."""
        return np.where(sizes == 1, self._room_alone, self._room_each * sizes)

    @cached_property
    def base_token_pair(self) -> tuple[NDArray[np.float64], ...]:
        """The coefficients of each size: three f64[sizes]."""
        return self.coefficients_of(self.sizes)

    @cached_property
    def allowed_base_token_pair(self) -> tuple[NDArray[np.float64], ...]:
        """The coefficients of every allowed size: three f64[allowed]."""
        return self.coefficients_of(list(self.table))

    def coefficients_of(self, sizes: Sequence[int]) -> tuple[NDArray[np.float64], ...]:
        """Return the coefficients of these sizes, as three arrays."""
        return tuple(np.array(column) for column in zip(*(self.table[size] for size in sizes), strict=True))

    @cached_property
    def distinct(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The indices of one sequence of each length, ascending, and the place of every sequence among them."""
        _, first, place = np.unique(self.lengths, return_index=True, return_inverse=True)
        return first, place

    @cached_property
    def seconds_alone(self) -> NDArray[np.float64]:
        """The seconds of a group with one such sequence alone, f64[sizes, distinct lengths]; infinite without room."""
        chosen = self.distinct[0]
        lengths, pairs = self.lengths[chosen], self.pairs[chosen]
        base, token, pair = (column[:, None] for column in self.base_token_pair)
        each = np.array([sequence_align(size, self.layout) for size in self.sizes])[:, None]
        seconds = base + token * lengths + pair * pairs
        return np.where(ceil_div_array(lengths, each) * each <= self.rooms[:, None], seconds, np.inf)

    @cached_property
    def intervals(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The least values over intervals of sizes (each size alone for few ranks or lengths), which hold for every
        allowed size: two f64[intervals, distinct lengths], infinite where such a sequence has no room.

        (seconds alone; rank-seconds beyond the least base: its own seconds on each rank, and by its tokens its share of
        the size's base above the least). Both are linear in (length, pairs), with coefficients by size. With the least
        of each coefficient over an interval they are not above those of any size in it. A sequence that fits some size
        of an interval fits its widest.
        """
        chosen, allowed = self.distinct[0], self.allowed
        lengths, pairs = self.lengths[chosen], self.pairs[chosen]
        starts = interval_starts(allowed, len(chosen))
        base, token, pair = self.allowed_base_token_pair
        rooms = self.rooms_of(allowed)
        share = allowed * (base - self.least_base) / np.maximum(rooms, 1)
        rows = (base, token, pair, allowed * token + share, allowed * pair)
        lowest = [np.minimum.reduceat(row, starts)[:, None] for row in rows]
        widest = np.maximum.reduceat(rooms, starts)[:, None]
        fits = lengths <= widest
        alone = np.where(fits, lowest[0] + lowest[1] * lengths + lowest[2] * pairs, np.inf)
        return alone, np.where(fits, lowest[3] * lengths + lowest[4] * pairs, np.inf)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """The number of sequences of each length, i64[distinct lengths]."""
        return np.bincount(self.distinct[1], minlength=len(self.distinct[0]))

    @cached_property
    def smallest_sizes(self) -> NDArray[np.int64]:
        """The smallest allowed size that can hold each sequence; 0 where none can.

        A room is a multiple of what sequences are padded to: it holds a sequence just where it holds its tokens.
        """
        rooms = np.maximum.accumulate(self.rooms_of(self.allowed))
        return np.append(self.allowed, 0)[np.searchsorted(rooms, self.lengths)]

    @cached_property
    def min_steps(self) -> int:
        """A lower bound of the number of steps, by the sum of the lengths."""
        return max(1, ceil_div(int(self.lengths.sum()), self.world_size * self.room(1)))

    @cached_property
    def least_base(self) -> float:
        """A lower bound of the seconds of a step."""
        return min(factors.base for factors in self.table.values())

    @cached_property
    def static_sizes(self) -> list[int]:
        """Sizes that divide the world and hold every sequence."""
        alone = zip(self.sizes, np.isfinite(self.seconds_alone), strict=True)
        return [size for size, fits in alone if fits.all() and self.world_size % size == 0]

    def bin_of(self, size: int, samples: Sequence[int]) -> Bin:
        """Return a bin of this size with these samples; its room is negative where they do not fit."""
        tokens, seconds = self.columns(size)
        left = self.room(size) - sum(tokens[i] for i in samples)
        return Bin(size, left, sum(seconds[i] for i in samples), list(samples))

    def packed(self, size: int, samples: Sequence[int]) -> Bins:
        """Return the samples in few groups of this size, packed by tokens alone, the fullest first. Cached."""
        key = (size, tuple(samples))
        if key not in self._packed:
            tokens, _ = self.columns(size)
            needed, room = [tokens[i] for i in samples], self.room(size)
            plan = pack(needed, room)
            bins: Sequence[Sequence[int]] = plan.bins
            if len(samples) <= SMALL_COUNT and len(bins) > plan.lower_bound:
                bins = min(bins, tight_bins(needed, room), key=len)
                if len(bins) > plan.lower_bound:
                    bins = completed_bins(needed, room, len(bins) - 1) or bins
            fullest_first = sorted(bins, key=lambda places: -sum(needed[place] for place in places))
            self._packed[key] = tuple(tuple(samples[place] for place in places) for places in fullest_first)
        return self._packed[key]

    def bin_seconds(self, b: Bin) -> float:
        """Return the seconds of a group, base included."""
        return self.table[b.size].base + b.seconds

    def step_seconds(self, bins: Sequence[Bin]) -> float:
        """Return the seconds of a step's slowest group; ranks in no group run a dummy alone."""
        slowest = max((self.table[b.size].base + b.seconds for b in bins), default=0.0)
        idle = self.world_size > sum(b.size for b in bins)
        return max(slowest, self.table[1].base) if idle else slowest

    def candidate(self, steps: list[list[Bin]], name: str) -> CandidatePlan:
        """Return the candidate of these steps, with their seconds."""
        return CandidatePlan(steps, [self.step_seconds(step) for step in steps], name)


def laid_out(step: Sequence[Bin]) -> list[tuple[int, Bin]]:
    """Return (first rank, bin), widest first. Equal sizes have equal first ranks in every step: few process groups."""
    start, placed = 0, []
    for b in sorted(step, key=lambda b: (-b.size, -b.seconds)):
        placed.append((start, b))
        start += b.size
    return placed


def most_process_groups(candidate: CandidatePlan, world_size: int) -> int:
    """Return the most distinct process groups that any rank would be in, the world not counted."""
    counts: Counter[int] = Counter()
    spans = {(start, b.size) for step in candidate.steps for start, b in laid_out(step) if 1 < b.size < world_size}
    for start, size in spans:
        counts.update(range(start, start + size))
    return max(counts.values(), default=0)


def ceil_div_array(a: NDArray[np.int64], b: NDArray[np.int64] | int) -> NDArray[np.int64]:
    """Return the smallest integers at least a / b."""
    return -(-a // b)
