"""What no plan can beat: lower bounds for packing (in exact integer arithmetic) and for balancing."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def volume_bound(lengths: Ints, capacity: int) -> int:
    """Return the number of bins that the tokens alone need."""
    return -(-int(lengths.sum()) // capacity)


def threshold_bound(descending: Ints, capacity: int) -> int:
    """Return the bound L2 of Martello and Toth (1990), the best over every threshold k <= capacity / 2.

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
    thresholds = small[np.diff(small, append=0) != 0] if len(small) else np.zeros(1, dtype=np.int64)
    alone = np.searchsorted(ascending, thresholds - capacity, side="left")
    counted = np.searchsorted(ascending, -thresholds, side="right")
    room = (half - alone) * capacity - (sums[half] - sums[alone])
    rest = sums[counted] - sums[half] - room
    return int((half + np.maximum(0, -(-rest // capacity))).max())


def rounding_bound(lengths: Ints, counts: Ints, capacity: int, k: int) -> int:
    """Return the bound of Fekete and Schepers' dual feasible function u^(k) (2001); `counts[i]` have `lengths[i]`.

    With x = length / capacity: u(x) = x where (k + 1) x is an integer, else floor((k + 1) x) / k. It holds lengths
    just above capacity / (k + 1), of which k fit in a bin.
    """
    steps, remainder = np.divmod(lengths * (k + 1), capacity)
    # u in units of 1 / (k * capacity), so that everything stays an integer
    total = int((counts * np.where(remainder == 0, lengths * k, steps * capacity)).sum())
    return -(-total // (k * capacity))


def slope_bound(lengths: Ints, counts: Ints, capacity: int, p: int, q: int) -> int:
    """Return the bound of Burdett and Johnson's dual feasible function (1977) with parameter z = p / q >= 1.

    f(x) = (floor(z x) + max(0, frac(z x) - frac(z)) / (1 - frac(z))) / floor(z), with x = length / capacity. For z
    between 2 and 3 it counts lengths around capacity / 3, where some bins hold two and some three, better than
    their volume.
    """
    whole = p // q
    start = (p - whole * q) * capacity
    unit = q * capacity - start
    steps, remainder = np.divmod(lengths * p, q * capacity)
    total = int((counts * (steps * unit + np.maximum(0, remainder - start))).sum())
    return -(-total // (unit * whole))


def best_slope_bound(lengths: Ints, counts: Ints, capacity: int) -> int:
    """Return the best of `slope_bound` over z in eighths up to 6, refined around the best of them down to 1/256."""
    step = 8
    best, p = max((slope_bound(lengths, counts, capacity, p, step), p) for p in range(step + 1, 6 * step) if p % step)
    while step < 256:
        step *= 2
        tried = max((slope_bound(lengths, counts, capacity, n, step), n) for n in (2 * p - 1, 2 * p, 2 * p + 1))
        best, p = max(best, tried[0]), tried[1]
    return best


def bins_bound(descending: Ints, capacity: int, enough: int) -> int:
    """Return the best of the bounds; stop as soon as one reaches `enough`, the number of bins of a known packing."""
    best = volume_bound(descending, capacity)
    if best < enough:
        best = max(best, threshold_bound(descending, capacity))
    if best < enough:
        lengths, counts = np.unique(descending, return_counts=True)
        best = max(best, *(rounding_bound(lengths, counts, capacity, k) for k in range(2, 8)))
        if best < enough:
            best = max(best, best_slope_bound(lengths, counts, capacity))
    return best


def max_part_bound(descending: Floats, parts: int, equal_size: bool) -> float:
    """Return a cost that some part must reach.

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
