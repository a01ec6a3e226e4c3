"""Certified bin packing: never over capacity, and a lower bound that says how far from optimal the plan can be."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from seqpack.planning.bounds import Ints, bins_bound
from seqpack.planning.checks import Array, check_lengths, check_positive_int
from seqpack.planning.cutting_stock import small_kinds
from seqpack.planning.exact_fill import fill_bins
from seqpack.planning.padding import (
    Bucket,
    aligned_length,
    check_aligned,
    frozen_bucket,
    packed_geometry,
    usable_capacity,
)
from seqpack.planning.plan_json import from_json, plan_hash, to_json

Bins = Sequence[Sequence[int]]

LARGEST = 2**52
"""Lengths times the capacity of a bin: up to here 64 bits hold everything that packing and its bounds compute."""
CLOSE_ENOUGH = 0.005
"""A packing by best fit with this gap is taken; else other ways of packing are tried."""


@dataclass(frozen=True)
class PackPlan:
    """Bins of indices, none over `capacity`; no packing of these lengths can use fewer than `lower_bound` bins.

    `lengths` are true lengths, each of which takes the next multiple of `align`; a bin is padded to a `bucket`.
    """

    bins: tuple[tuple[int, ...], ...]
    capacity: int
    lower_bound: int
    lengths: tuple[int, ...]
    align: int = 1
    bucket: Bucket = None

    @property
    def gap(self) -> float:
        """Bins over the lower bound, minus one: 0.0 is proven optimal."""
        return len(self.bins) / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def loads(self) -> tuple[int, ...]:
        """Tokens of each bin, padding included."""
        return tuple(packed_geometry([self.lengths[i] for i in b], self.align, self.bucket).total for b in self.bins)

    @property
    def fill(self) -> float:
        """True tokens over the capacity of all bins; 1.0 for no bins."""
        return sum(self.lengths) / (len(self.bins) * self.capacity) if self.bins else 1.0

    @cached_property
    def hash(self) -> int:
        """The 52-bit hash that ranks compare before they start."""
        return plan_hash(self.to_json())

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "PackPlan":
        """Read what `to_json` wrote; ValueError for anything else."""
        return from_json(cls, text)


def pack(
    lengths: Sequence[int] | Array, capacity: int, align: int = 1, bucket: int | Sequence[int] | None = None
) -> PackPlan:
    """Pack the lengths into few bins of `capacity`; deterministic.

    No bin is over the capacity after padding: each sequence is rounded up to a multiple of `align`, the bin to `bucket`
    (a multiple, or the sizes to choose from), as `packed_geometry` and `pack_sequences` do. Raises ValueError naming
    the index and length that cannot fit, or is not a positive integer.
    """
    cap = check_positive_int(capacity, "capacity")
    true = check_lengths(lengths, cap)
    usable = usable_capacity(cap, align, bucket)
    # Counted in units of `align`: every row of whole sequences is a whole number of them.
    sizes = [aligned_length(size, align) // align for size in check_aligned(true, align, usable)]
    room = min(usable // align, sum(sizes) or 1)  # more than all lengths together is as good as that
    if room * len(sizes) > LARGEST:
        raise ValueError(f"{len(sizes)} lengths for bins of {room} are beyond 2**52 in all: count in a coarser unit")
    array = np.array(sizes, dtype=np.int64)
    # 16 bits are sorted by their digits, in a third of the time
    order = np.argsort((room - array).astype(np.uint16) if room < 2**16 else -array, kind="stable")
    descending = array[order]
    bins, bound = _few_bins(descending, order, room)
    return PackPlan(tuple(map(tuple, bins)), cap, bound, tuple(true), align, frozen_bucket(bucket))


def _few_bins(descending: Ints, names: Ints, capacity: int) -> tuple[Bins, int]:
    """Pack by the method that suits the lengths, by best fit anyway, and by columns while the gap is wide."""
    ways: list[Callable[[Ints, Ints, int], Bins]] = [best_fit, exact_fit]
    if len(descending) and descending[0] * 2 <= capacity:  # none alone, and hardly a short one to fill gaps with
        short = int(descending[np.searchsorted(-descending, -(capacity // 8), side="right") :].sum())
        if short * 10 < int(descending.sum()):
            ways.reverse()
    bins = ways[0](descending, names, capacity)
    bound = bins_bound(descending, capacity, len(bins))
    enough = bound * (1 + CLOSE_ENOUGH) if ways[0] is best_fit else bound
    if len(bins) > enough:
        bins = min(bins, ways[1](descending, names, capacity), key=len)
    if len(bins) > bound * (1 + CLOSE_ENOUGH):
        columns, proven = small_kinds(descending, names, capacity)
        bound = max(bound, proven)
        bins = min(bins, columns or bins, key=len)
    return bins, bound


def exact_fit(descending: Ints, names: Ints, capacity: int) -> Bins:
    """Fill bins exactly as far as possible, then place the other items by best fit."""
    bins, left = fill_bins(descending, names, capacity)
    return [*bins, *best_fit(descending[left], names[left], capacity)]


def best_fit(descending: Ints, names: Ints, capacity: int) -> list[list[int]]:
    """Place items, longest first, each into the fullest bin that still has room, and return the bins' names.

    Because lengths only fall, the bins with room for the present length form a stack with the fullest on top: a bin
    that no longer takes this length waits in a heap, and comes back, fuller than all on the stack, when lengths
    have fallen to its room. Linear after the sort, but for the heap. Equal lengths go in together.
    """
    count = len(descending)
    if not count:
        return []
    shift = count.bit_length()  # a bin is one integer: its room above its number, so that it sorts by room
    mask = (1 << shift) - 1
    floor = int(descending[-1]) << shift
    items = names.tolist()
    # No two lengths above half the capacity share a bin.
    large = int(np.searchsorted(-descending, -(capacity // 2), side="left"))
    bins = [[item] for item in items[:large]]
    waiting = (-((capacity - descending[:large]) << shift | np.arange(large)))[::-1].tolist()
    ends = [*(np.flatnonzero(np.diff(descending[large:])) + large + 1).tolist(), count] if large < count else []
    stack: list[int] = []
    start = large
    for end in ends:
        size = int(descending[start])
        step = size << shift
        while waiting and waiting[0] <= -step:
            stack.append(-heappop(waiting))
        while start < end:
            if stack:
                state = stack.pop()
            else:
                state = (capacity << shift) | len(bins)
                bins.append([])
            taken = 1 if end - start == 1 else min((state >> shift) // size, end - start)
            bins[state & mask] += items[start : start + taken]
            start += taken
            state -= step * taken
            if state >= step:
                stack.append(state)
            elif state >= floor:
                heappush(waiting, -state)
    return bins
