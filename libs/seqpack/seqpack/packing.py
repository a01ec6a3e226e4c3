"""Certified bin packing: never over capacity, and a lower bound that says how far from optimal the plan can be."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from seqpack.checks import check_lengths, check_positive_int


@dataclass(frozen=True)
class PackPlan:
    """Bins of indices, none over `capacity`; no packing of these lengths can use fewer than `lower_bound` bins."""

    bins: tuple[tuple[int, ...], ...]
    capacity: int
    lower_bound: int
    lengths: tuple[int, ...]

    @property
    def gap(self) -> float:
        """Bins over the lower bound, minus one: 0.0 is proven optimal."""
        return len(self.bins) / self.lower_bound - 1 if self.lower_bound else 0.0

    @property
    def loads(self) -> tuple[int, ...]:
        """Tokens in each bin."""
        return tuple(sum(self.lengths[i] for i in items) for items in self.bins)

    @property
    def fill(self) -> float:
        """Tokens over the capacity of all bins; 1.0 for no bins."""
        return sum(self.lengths) / (len(self.bins) * self.capacity) if self.bins else 1.0


def pack(lengths: Sequence[int], capacity: int) -> PackPlan:
    """Put the lengths into few bins of `capacity`; deterministic.

    Raises ValueError naming the index and length that cannot fit, or is not a positive integer.
    """
    cap = check_positive_int(capacity, "capacity")
    sizes = check_lengths(lengths, cap)
    bins = best_fit_decreasing(sizes, cap)
    return PackPlan(tuple(tuple(sorted(items)) for items in bins), cap, -(-sum(sizes) // cap), tuple(sizes))


def best_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Place items, longest first, each into the fullest bin that still has room."""
    order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, bin), sorted
    for index in order:
        size = sizes[index]
        at = bisect_left(free, (size, -1))
        if at == len(free):
            room, target = capacity, len(bins)
            bins.append([index])
        else:
            room, target = free.pop(at)
            bins[target].append(index)
        rest = (room - size, target)
        free.insert(bisect_left(free, rest), rest)
    return bins
