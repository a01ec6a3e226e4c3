"""Which group sizes a search tries, and intervals of sizes for what must hold of every size there is.

Up to `EVERY` ranks each size is tried. Above it are too many for every search: eight between powers of two are tried,
the divisors of the world, and the smallest size that holds each sequence. A proof may leave none out: where every
size beside every length would be too many numbers, neighbouring sizes share an interval.
"""

import numpy as np
from numpy.typing import NDArray

EVERY = 64
MOST_NEEDED = 64
"""Sizes above `EVERY` that are tried only because a sequence needs them."""
MOST_BOUNDED = 200_000
"""Sizes times lengths of a bound that looks at each size alone."""

Ints = NDArray[np.int64]


def tried_sizes(allowed: Ints, needed: Ints, world_size: int) -> list[int]:
    """Return the sizes that searches try, ascending, out of `allowed` (ascending).

    needed: i64[any], the smallest size of each sequence; above `EVERY` at most `MOST_NEEDED` of them, spread evenly.
    """
    wide = np.unique(needed[needed > EVERY])
    if len(wide) > MOST_NEEDED:
        wide = wide[np.linspace(0, len(wide) - 1, MOST_NEEDED).astype(np.int64)]
    chosen = (allowed <= EVERY) | (world_size % allowed == 0) | np.isin(allowed, _eighths(world_size))
    sizes: list[int] = allowed[chosen | np.isin(allowed, wide)].tolist()
    return sizes


def interval_starts(allowed: Ints, lengths: int) -> Ints:
    """Return the first index in `allowed` of each interval of sizes: single sizes where there are few enough lengths.

    Else sizes up to `EVERY` are single, and an interval begins at each eighth between powers of two.
    """
    alone = np.ones(len(allowed), dtype=bool)
    if len(allowed) * lengths > MOST_BOUNDED and len(allowed):
        eighths = np.array(_eighths(int(allowed[-1])), dtype=np.int64)
        interval = np.searchsorted(eighths, allowed, side="right")
        alone[1:] = (allowed[1:] <= EVERY) | (interval[1:] != interval[:-1])
    return np.flatnonzero(alone)


def _eighths(most: int) -> list[int]:
    """Return EVERY, EVERY + EVERY / 8, .., 2 x EVERY, 2 x EVERY + 2 x EVERY / 8, .. up to `most`."""
    sizes, power = [], EVERY
    while power <= most:
        sizes += [size for size in range(power, 2 * power, power // 8) if size <= most]
        power *= 2
    return sizes
