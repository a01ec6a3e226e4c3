"""What no plan can beat: lower bounds for packing (in exact integer arithmetic) and for balancing."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def volume_bound(lengths: Ints, capacity: int) -> int:
    """Bins that the tokens alone need."""
    return -(-int(lengths.sum()) // capacity)


def threshold_bound(descending: Ints, capacity: int) -> int:
    """Bound L2 of Martello and Toth (1990), the best over every threshold k <= capacity / 2.

    Lengths above capacity - k get a bin of their own; those in (capacity / 2, capacity - k] one each, and what is
    left of these bins can take the lengths in [k, capacity / 2]; shorter ones are forgotten. `descending` is
    sorted.
    """
    if not len(descending):
        return 0
    sums = np.concatenate([[0], np.cumsum(descending)])
    ascending = -descending
    half = int(np.searchsorted(ascending, -(capacity // 2), side="left"))
    small = descending[half:]
    thresholds = np.unique(small) if len(small) else np.zeros(1, dtype=np.int64)
    alone = np.searchsorted(ascending, thresholds - capacity, side="left")
    counted = np.searchsorted(ascending, -thresholds, side="right")
    room = (half - alone) * capacity - (sums[half] - sums[alone])
    rest = sums[counted] - sums[half] - room
    return int((half + np.maximum(0, -(-rest // capacity))).max())


def rounding_bound(lengths: Ints, capacity: int, k: int) -> int:
    """Bound by the dual feasible function u^(k) of Fekete and Schepers (2001).

    With x = length / capacity: u(x) = x where (k + 1) x is an integer, else floor((k + 1) x) / k. It holds lengths
    just above capacity / (k + 1), of which k fit in a bin.
    """
    steps, remainder = np.divmod(lengths * (k + 1), capacity)
    # u in units of 1 / (k * capacity), so that everything stays an integer
    total = int(np.where(remainder == 0, lengths * k, steps * capacity).sum())
    return -(-total // (k * capacity))


def bins_bound(descending: Ints, capacity: int, enough: int) -> int:
    """Best of the bounds; stops as soon as it reaches `enough`, the bins of a packing at hand."""
    best = volume_bound(descending, capacity)
    if best < enough:
        best = max(best, threshold_bound(descending, capacity))
    for k in range(2, 12):
        if best >= enough:
            break
        best = max(best, rounding_bound(descending, capacity, k))
    return best


def heaviest_part_bound(descending: Floats, parts: int, equal_size: bool) -> float:
    """Cost that some part must reach.

    The mean; the largest cost; for each j, of the j * parts + 1 largest costs some part holds j + 1, at least the j
    + 1 smallest of them. With `equal_size` the part of the largest cost also holds the other n // parts - 1 or
    more, at least the smallest.
    """
    count = len(descending)
    if not count:
        return 0.0
    best = max(float(descending.sum()) / parts, float(descending[0]))
    sums = np.concatenate([[0.0], np.cumsum(descending)])
    for j in range(1, (count - 1) // parts + 1):
        last = j * parts + 1
        best = max(best, float(sums[last] - sums[last - j - 1]))
    others = count // parts - 1
    if equal_size and others > 0:
        best = max(best, float(descending[0] + sums[count] - sums[count - others]))
    return best
