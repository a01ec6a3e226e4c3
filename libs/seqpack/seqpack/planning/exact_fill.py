"""Fill bins exactly: for lengths among which nothing is short enough to fill the gaps that best fit leaves.

Where most lengths lie between a tenth and a half of the capacity, best fit decreasing pairs the longest ones and leaves
gaps that no length fits: up to a tenth of the tokens. Strategy:

1. Round the lengths up to `LEVELS` levels of the capacity, and count how many there are of each: a level is one bit of
   a bitmap, set while some are left. A second bitmap holds the same bits in reverse order.
2. A bin gets about capacity / mean(lengths left) lengths. Is that close to an integer n (`SETTLED`), bins of n use up
   everything; else bins of one fewer, begun with the longest, or of one more, begun with the shortest, bring it closer.
3. Begin a bin from one end of what is left (in turn from both, where settled) and go on so until two lengths are
   missing. Both ends are used up together, so that what is left stays alike.
4. Close it by two lengths that fill it exactly: levels a and room - a are both set where the bitmap, shifted, AND the
   reversed one, shifted, has a bit, all a in one operation. Allow up to `SLACK` levels of gap. Among the pairs, take
   one at a place that changes from bin to bin (multiples of the golden ratio), so that no level runs out early.
5. Where nothing closes a bin, leave its first length to best fit; give up after one in thirty-two.

Invariants that the tests assert: each item is in one bin or left over; no bin is over the capacity; a bin of more than
two misses at most the slack and what rounding added.
"""

import numpy as np
from numpy.typing import NDArray

from seqpack.planning.bounds import Ints

LEVELS = 2048
"""Lengths are rounded up to this fraction of the capacity, which keeps the bitmaps at a quarter of a kilobyte."""
SLACK = 6
"""Levels that a bin may stay below the capacity, and one more."""
SETTLED = 0.005
"""How near capacity / mean must be to an integer for bins of that many lengths to use up everything."""
GOLDEN = 0.6180339887498949
"""Multiples of it, modulo 1, spread evenly over [0, 1) however many there are."""


def fill_bins(descending: Ints, names: Ints, capacity: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Return bins of item names, and the positions in `descending` of the items that are in no bin.

    `descending` holds the lengths, each at most `capacity`, longest first. Deterministic. Gives up, with everything
    that is left, once one length in thirty-two found no partners.
    """
    if not len(descending):
        return [], []
    size = min(capacity, LEVELS)
    levels = -(-descending * size // capacity)
    counts = np.bincount(levels, minlength=size + 1)
    flat, sizes = _fill_levels(_Levels(counts, size), len(levels), int(levels.sum()))
    # Items of one level are alike: the first bin that asks for the level gets the first of them.
    chosen = np.array(flat, dtype=np.int64)
    asking = np.argsort((size - chosen).astype(np.uint16), kind="stable")  # 16 bits are sorted by their digits
    used = np.bincount(chosen, minlength=size + 1)
    first = len(levels) - np.cumsum(counts)  # where a level starts among the descending items
    start = len(flat) - np.cumsum(used)  # and among those that are asked for
    positions = np.empty(len(flat), dtype=np.int64)
    positions[asking] = np.arange(len(flat)) + (first - start)[chosen[asking]]
    in_bins = tuple(names[positions].tolist())
    ends = np.cumsum(sizes).tolist()
    bins = [in_bins[end - length : end] for end, length in zip(ends, sizes, strict=True)]
    return bins, np.delete(np.arange(len(levels)), positions).tolist()


def _fill_levels(pool: "_Levels", count: int, total: int) -> tuple[list[int], list[int]]:
    """Return the levels of all bins one after another, and the number of levels of each bin."""
    size, patience, turn = pool.size, count // 32, 0
    flat: list[int] = []
    sizes: list[int] = []
    alone = True
    while count and patience >= 0:
        turn += 1
        wanted, settled, short = 2, False, False  # no two above half a bin share one: each takes the longest that fits
        alone = alone and pool.longest(size) * 2 > size
        if not alone:
            ratio = size * count / total
            nearest = int(ratio + 0.5) if ratio > 3 else 3
            # Near an integer, bins of that many use up everything. Below it, bins of one fewer, the longest, raise
            # the ratio of a bin to the mean of what is left; above, bins of one more, the shortest, lower it.
            settled = -SETTLED < ratio - nearest < SETTLED
            wanted = nearest if settled else nearest - 1 if ratio < nearest else nearest + 1
            short = turn % 2 == 1 if settled else wanted > nearest
        levels = [pool.shortest() if short else pool.longest(size)]
        pool.take(levels[0])
        room = size - levels[0]
        if wanted > 3:
            room = pool.more(levels, wanted - 2, room, short, settled)
        if wanted > 2:
            room = pool.close(levels, room, turn * GOLDEN % 1)
        else:
            room = pool.partner(levels, room)
        if len(levels) == wanted or alone:
            flat += levels
            sizes.append(len(levels))
            count -= len(levels)
            total -= size - room
        else:  # nothing closes this bin: its first length waits for best fit, the others go back
            for level in levels[1:]:
                pool.put(level)
            patience -= 1
            count -= 1
            total -= levels[0]
    return flat, sizes


class _Levels:
    """How many items of each level are in no bin yet, with a bitmap of the levels and the same in reverse."""

    def __init__(self, counts: Ints, size: int) -> None:
        self.size = size
        self.counts: list[int] = counts.tolist()
        self.bits, self.reversed_bits = _as_int(counts > 0), _as_int(counts[::-1] > 0)
        self.low, self.high = 1, size

    def take(self, level: int) -> None:
        """Remove an item of that level."""
        self.counts[level] -= 1
        if not self.counts[level]:
            self._flip(level)

    def put(self, level: int) -> None:
        """Put an item back."""
        if not self.counts[level]:
            self._flip(level)
            self.low, self.high = min(self.low, level), max(self.high, level)
        self.counts[level] += 1

    def shortest(self) -> int:
        """Return the lowest level; there must be one."""
        while not self.counts[self.low]:
            self.low += 1
        return self.low

    def longest(self, most: int) -> int:
        """Return the highest level up to `most`, at most 0 when there is none."""
        while self.high > 0 and not self.counts[self.high]:
            self.high -= 1
        if self.high <= most:
            return self.high
        return (self.bits & ((1 << most + 1) - 1)).bit_length() - 1 if most > 0 else 0

    def partner(self, levels: list[int], room: int) -> int:
        """Take the longest level that fits in the room, add it to `levels` and return the room left."""
        level = self.longest(room)
        if level > 0:
            self.take(level)
            levels.append(level)
            room -= level
        return room

    def more(self, levels: list[int], wanted: int, room: int, short: bool, settled: bool) -> int:
        """Take `wanted` levels in all, from both ends alternately (settled) or from one; return the room left."""
        while len(levels) < wanted and self.longest(self.size) > 0:
            short = short != settled
            others = wanted + 1 - len(levels)
            level = self.shortest() if short else self.longest(room - others * self.shortest())
            if not 0 < level < room:
                break
            self.take(level)
            levels.append(level)
            room -= level
        return room

    def close(self, levels: list[int], room: int, share: float) -> int:
        """Take two levels that fill the room up to the slack, add them to `levels` and return the room left.

        `share` in [0, 1) chooses among the pairs, from the most alike to the most unlike.
        """
        for slack in range(min(SLACK, room)):
            total = room - slack
            half = (total + 1) // 2
            both = (self.bits >> half) & (self.reversed_bits >> (self.size - total + half))
            if not both:
                continue
            most = both.bit_length() - 1
            start = int(share * most)
            above = both >> start
            longer = half + start + (above & -above).bit_length() - 1
            if 2 * longer == total and self.counts[longer] < 2:
                if not most:
                    continue
                longer = half + most  # the item in the middle is alone, the most unlike pair is whole
            pair = (longer, total - longer)
            levels += pair
            for level in pair:  # `take`, without two calls in the innermost loop
                self.counts[level] -= 1
                if not self.counts[level]:
                    self._flip(level)
            return slack
        return room

    def _flip(self, level: int) -> None:
        self.bits ^= 1 << level
        self.reversed_bits ^= 1 << (self.size - level)


def _as_int(bits: NDArray[np.bool_]) -> int:
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")
