"""Exact answers by exhaustion, for a dozen items at most: the oracles that the fast planners are tested against."""

from collections.abc import Sequence
from functools import cache

MAX_ITEMS = 14


def min_bins(lengths: Sequence[int], capacity: int) -> int:
    """Return the least number of bins that can hold the lengths; ValueError past 14 items.

    For each set of items the pair (bins, fill of the last bin) is kept, the least in this order: a set filled item
    by item in the best order reaches the optimum.
    """
    _check_size(lengths)
    state: list[tuple[int, int]] = [(0, capacity)] + [(len(lengths) + 1, 0)] * ((1 << len(lengths)) - 1)
    for items in range(1, 1 << len(lengths)):
        for i, length in enumerate(lengths):
            if items >> i & 1:
                bins, fill = state[items ^ (1 << i)]
                reached = (bins, fill + length) if fill + length <= capacity else (bins + 1, length)
                state[items] = min(state[items], reached)
    return state[-1][0]


def least_maximum(costs: Sequence[float], num_parts: int, equal_size: bool = False) -> float:
    """Return the least cost that the heaviest of `num_parts` parts can have; ValueError past 14 items."""
    _check_size(costs)
    count = len(costs)
    everything = (1 << count) - 1
    small, larger = divmod(count, num_parts)
    sums = [sum(costs[i] for i in range(count) if items >> i & 1) for items in range(everything + 1)]

    @cache
    def best(left: int, parts: int, bigger: int) -> float:
        """Return the least maximum of items `left` over `parts` parts, of which `bigger` must have small + 1 items."""
        if parts == 0:
            return 0.0 if left == 0 else float("inf")
        least, items = float("inf"), left
        while True:  # every subset of `left`, the empty one last
            size = items.bit_count()
            allowed = not equal_size or size == small or (size == small + 1 and bigger > 0)
            if allowed and sums[items] < least:
                rest = best(left ^ items, parts - 1, bigger - (equal_size and size == small + 1))
                least = min(least, max(sums[items], rest))
            if items == 0:
                return least
            items = (items - 1) & left

    return best(everything, num_parts, larger)


def _check_size(values: Sequence[float]) -> None:
    if len(values) > MAX_ITEMS:
        raise ValueError(f"{len(values)} items are too many to try everything; at most {MAX_ITEMS}")
