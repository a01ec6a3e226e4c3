"""Bins of a few long lengths, each filled exactly: for lengths with nothing short among them to fill gaps with.

Where most lengths lie between a tenth and a half of the capacity, best fit decreasing pairs the longest ones and leaves
gaps that no length fits: up to a tenth of the tokens. Here a bin gets about capacity / mean lengths. It is begun from
an end of what is left, the longest and the shortest in turn, so that both ends shrink together, and closed by two
lengths that fill it exactly, found by one AND of a bitmap of the lengths left and its mirror image.
"""

import numpy as np
from numpy.typing import NDArray

from seqpack.bounds import Ints

LEVELS = 2048
"""Lengths are rounded up to this fraction of the capacity, which keeps the bitmaps at a quarter of a kilobyte."""
SLACK = 6
"""Levels that a bin may stay below the capacity, and one more."""
SETTLED = 0.005
"""How near capacity / mean must be to an integer for bins of that many lengths to use up everything."""
GOLDEN = 0.6180339887498949


def fill_bins(descending: Ints, names: Ints, capacity: int) -> tuple[list[list[int]], list[int]]:
    """Return bins of the items' names, and the positions in `descending` of the items that are in none of them.

    `descending` holds the lengths, each at most `capacity`, longest first. Deterministic. Gives up, with everything
    that is left, once one length in thirty-two found no partners.
    """
    size = min(capacity, LEVELS)
    levels = -(-descending * size // capacity)
    pool = _Pool(levels, size)
    count, total, turn = len(descending), int(levels.sum()), 0
    bins: list[list[int]] = []
    left: list[int] = []
    patience = count // 32
    while count and len(left) <= patience:
        turn += 1
        wanted, settled, short = _next_bin(size * count / total, turn)
        items, room = pool.fill(wanted, short, settled, turn * GOLDEN % 1)
        if len(items) < wanted:  # nothing closes this bin: its first length waits for best fit, the others go back
            for item in items[1:]:
                pool.put(item)
            left.append(items[0])
            count -= 1
            total -= pool.level[items[0]]
        else:
            bins.append(items)
            count -= wanted
            total -= size - room
    left += pool.rest()
    given = names.tolist()
    return [[given[item] for item in items] for items in bins], sorted(left)


def _next_bin(ratio: float, turn: int) -> tuple[int, bool, bool]:
    """Return how many lengths the next bin gets, whether that is settled, and whether it begins with the shortest.

    `ratio` is the bin over the mean of what is left. Near an integer, bins of that many lengths use up everything.
    Below it, bins of one length fewer, the longest, raise the ratio; above, bins of one more, the shortest, lower it.
    """
    nearest = max(3, int(ratio + 0.5))
    if -SETTLED < ratio - nearest < SETTLED:
        return nearest, True, turn % 2 == 1
    return (nearest - 1, False, False) if ratio < nearest else (nearest + 1, False, True)


class _Pool:
    """The items that are in no bin yet, by level, with a bitmap of the levels and its mirror image."""

    def __init__(self, levels: Ints, size: int) -> None:
        self.size = size
        self.level: list[int] = levels.tolist()
        self.items: list[list[int]] = [[] for _ in range(size + 1)]
        ends = np.flatnonzero(np.diff(levels, append=0)) + 1
        start = 0
        for end in ends.tolist():
            self.items[self.level[start]] = list(range(start, end))
            start = end
        present = np.zeros(size + 1, dtype=bool)
        present[levels] = True
        self.bits, self.mirror = _as_int(present), _as_int(present[::-1])
        self.low, self.high = 1, size

    def take(self, level: int) -> int:
        """Remove and return an item of that level."""
        items = self.items[level]
        item = items.pop()
        if not items:
            self._flip(level)
        return item

    def put(self, item: int) -> None:
        """Put an item back."""
        level = self.level[item]
        if not self.items[level]:
            self._flip(level)
            self.low, self.high = min(self.low, level), max(self.high, level)
        self.items[level].append(item)

    def rest(self) -> list[int]:
        """Return all items that are still here."""
        return [item for items in self.items for item in items]

    def shortest(self) -> int:
        """Return the lowest level; there must be one."""
        while not self.items[self.low]:
            self.low += 1
        return self.low

    def longest(self, most: int) -> int:
        """Return the highest level up to `most`, at most 0 when there is none."""
        while self.high > 0 and not self.items[self.high]:
            self.high -= 1
        if self.high <= most:
            return self.high
        return (self.bits & ((1 << most + 1) - 1)).bit_length() - 1 if most > 0 else 0

    def pair(self, total: int, share: float) -> tuple[int, int] | None:
        """Return two levels that add up to `total`, or None; `share` in [0, 1) chooses, from alike to most unlike."""
        half = (total + 1) // 2
        both = (self.bits >> half) & (self.mirror >> (self.size - total + half))
        if not both:
            return None
        most = both.bit_length() - 1
        start = int(share * most)
        above = both >> start
        longer = half + start + (above & -above).bit_length() - 1
        if 2 * longer == total and len(self.items[longer]) < 2:
            if not most:
                return None
            longer = half + most  # the item in the middle is alone, the most unlike pair is whole
        return longer, total - longer

    def fill(self, wanted: int, short: bool, settled: bool, share: float) -> tuple[list[int], int]:
        """Take `wanted` items that fill a bin, or fewer where none do; return them and the levels left empty.

        The first comes from one end; more, but for the last two, from both ends in turn (settled) or the same one.
        """
        level = self.shortest() if short else self.longest(self.size)
        items, room = [self.take(level)], self.size - level
        if wanted == 2:
            level = self.longest(room)
            return ([*items, self.take(level)], room - level) if level > 0 else (items, room)
        for others in range(wanted - 2, 1, -1):
            short = short != settled
            if self.longest(self.size) == 0:
                return items, room
            level = self.shortest() if short else self.longest(room - others * self.shortest())
            if not 0 < level < room:
                return items, room
            items.append(self.take(level))
            room -= level
        for slack in range(min(SLACK, room)):
            pair = self.pair(room - slack, share)
            if pair is not None:
                return [*items, self.take(pair[0]), self.take(pair[1])], slack
        return items, room

    def _flip(self, level: int) -> None:
        self.bits ^= 1 << level
        self.mirror ^= 1 << (self.size - level)


def _as_int(bits: NDArray[np.bool_]) -> int:
    return int.from_bytes(np.packbits(bits, bitorder="little").tobytes(), "little")
