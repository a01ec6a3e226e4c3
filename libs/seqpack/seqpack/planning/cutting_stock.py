"""Packing where lengths are of few kinds: column generation (Gilmore and Gomory 1961), with the bound it proves.

A pattern says how many of each kind a bin holds. Strategy:

1. The linear program "fewest bins of any patterns, in fractions, that hold all" is solved by the simplex method over
   the patterns found so far, at first those of one kind alone.
2. Its dual prices say what a length of each kind is worth. A knapsack finds the pattern worth most; worth more than one
   bin, it joins the program. Every such price list is a bound too: all lengths' worth over the best pattern's (Farley
   1990), in integers, whatever rounding the prices went through.
3. The solution is rounded down. What is left, at most one bin a kind, is filled bin by bin with the pattern worth most
   of what is there; so is it for prices by size and by each kind's share; the fewest bins are taken.

The knapsack goes over all capacities at once, in blocks of 1, 2, 4, ... of a kind. Work is counted, not timed, and the
arithmetic is integers and single float operations in a fixed order: every machine finds the same.

Invariants that the tests assert: each length is in one bin, no bin is over the capacity, the bound is at most the
optimum, and the bins are at most 0.5 % (rounded up to one bin) over the bound on few kinds of lengths.
"""

from collections.abc import Sequence
from math import gcd

import numpy as np

from seqpack.planning.bounds import Ints

KINDS = 24
"""Up to so many kinds of lengths columns are generated."""
CAPACITIES = 2**20
"""Up to so large a capacity, in units that all lengths are multiples of."""
WORK = 2**28
"""Steps of knapsacks, over capacities, kinds and blocks, before the generation stops where it is."""
SCALE = 2**30
"""Price of a whole bin: prices are integers."""

Pattern = tuple[int, ...]


def cutting_stock(lengths: Sequence[int], counts: Sequence[int], capacity: int) -> tuple[list[Pattern], int]:
    """Return a pattern for each bin, that together hold `counts[i]` of each `lengths[i]`, and a bound on their number.

    The bound is 0, and there are no patterns, where the capacity is too large for the knapsack.
    """
    unit = gcd(*lengths)
    knapsack = _Knapsack([length // unit for length in lengths], capacity // unit)
    program = _Program([knapsack.capacity // size for size in knapsack.sizes], counts)
    bound, work, prices = 0, WORK, program.prices()
    if knapsack.capacity > CAPACITIES:
        return [], 0
    while True:
        pattern, worth = knapsack.best(prices, counts)
        bound = max(bound, -(-sum(p * n for p, n in zip(prices, counts, strict=True)) // worth))
        work -= knapsack.steps(counts)
        done = worth <= SCALE + SCALE // 10**6 or bound >= program.bins or work < 0
        if done or not program.take(pattern):
            break
        prices = program.prices()
    whole, left = program.rounded_down(counts)
    ways = [prices, knapsack.sizes, [size * size for size in knapsack.sizes]]
    return whole + min((knapsack.fill(way, left) for way in ways), key=len), bound


class _Knapsack:
    """The pattern that is worth most, by dynamic programming over capacities."""

    def __init__(self, sizes: list[int], capacity: int) -> None:
        self.sizes, self.capacity = sizes, capacity

    def _blocks(self, counts: Sequence[int]) -> list[tuple[int, int]]:
        """Return (kind, copies) of blocks that make up any number of copies that there are and that fit."""
        blocks = []
        for kind, size in enumerate(self.sizes):
            left, copies = min(counts[kind], self.capacity // size), 1
            while left > 0:
                blocks.append((kind, min(copies, left)))
                left -= copies
                copies *= 2
        return blocks

    def steps(self, counts: Sequence[int]) -> int:
        """Return the work of finding a pattern."""
        return self.capacity * len(self._blocks(counts))

    def best(self, prices: Sequence[int], counts: Sequence[int]) -> tuple[Pattern, int]:
        """Return the pattern that is worth most, of at most these counts, and its worth."""
        worth = np.zeros(self.capacity + 1, dtype=np.int64)
        taken = []
        for kind, copies in self._blocks(counts):
            size = copies * self.sizes[kind]
            more = worth[:-size] + copies * prices[kind]
            better = more > worth[size:]
            np.maximum(worth[size:], more, out=worth[size:])
            taken.append((kind, copies, size, better))
        pattern, room = [0] * len(self.sizes), self.capacity
        for kind, copies, size, better in reversed(taken):
            if room >= size and better[room - size]:
                pattern[kind] += copies
                room -= size
        return tuple(pattern), int(worth[-1])

    def fill(self, prices: Sequence[int], counts: Sequence[int]) -> list[Pattern]:
        """Return patterns that hold all counts, each the one worth most of what is left."""
        left, patterns = list(counts), list[Pattern]()
        while any(left):
            pattern, worth = self.best(prices, left)
            if not worth:  # what is left is worth nothing: any prices will do
                return patterns + self.fill(self.sizes, left)
            left = [n - used for n, used in zip(left, pattern, strict=True)]
            patterns.append(pattern)
        return patterns


class _Program:
    """The linear program, in the basis of its best solution so far: one pattern a kind, each used `uses` times."""

    def __init__(self, most: Sequence[int], counts: Sequence[int]) -> None:
        kinds = range(len(most))
        self.patterns: list[Pattern] = [tuple(most[i] * (i == j) for i in kinds) for j in kinds]
        self.inverse = [[(i == j) / most[i] for j in kinds] for i in kinds]
        self.uses = [counts[i] / most[i] for i in kinds]

    @property
    def bins(self) -> int:
        """Number of bins of the solution, rounded up."""
        return int(-(-(sum(self.uses) - 1e-6) // 1))

    def prices(self) -> list[int]:
        """Return the dual prices, what one length of each kind is worth, for a bin worth `SCALE`."""
        return [max(0, int(sum(column) * SCALE)) for column in zip(*self.inverse, strict=True)]

    def take(self, pattern: Pattern) -> bool:
        """Exchange a pattern of the basis for this one; False where rounding leaves nothing to exchange."""
        change = [sum(a * b for a, b in zip(row, pattern, strict=True)) for row in self.inverse]
        ratios = [(self.uses[i] / change[i], i) for i in range(len(change)) if change[i] > 1e-9]
        if not ratios:
            return False
        use, leaving = min(ratios)
        pivot = [value / change[leaving] for value in self.inverse[leaving]]
        for i, factor in enumerate(change):
            self.inverse[i] = [a - factor * b for a, b in zip(self.inverse[i], pivot, strict=True)]
            self.uses[i] = max(0.0, self.uses[i] - factor * use)
        self.inverse[leaving], self.uses[leaving] = pivot, use
        self.patterns[leaving] = pattern
        return True

    def rounded_down(self, counts: Sequence[int]) -> tuple[list[Pattern], list[int]]:
        """Return the patterns of whole bins, and the counts that are in none of them."""
        whole = [p for p, use in zip(self.patterns, self.uses, strict=True) for _ in range(int(use + 1e-6))]
        left = (
            [n - used for n, used in zip(counts, map(sum, zip(*whole, strict=True)), strict=True)]
            if whole
            else [*counts]
        )
        while min(left) < 0:  # the uses were rounded: a bin too many
            last = next(p for p in reversed(whole) if p[left.index(min(left))])
            whole.remove(last)
            left = [n + back for n, back in zip(left, last, strict=True)]
        return whole, left


def small_kinds(descending: Ints, names: Ints, capacity: int) -> tuple[list[list[int]], int]:
    """Return bins of the items' names by `cutting_stock` and the bound; no bins and 0 where it is not for these."""
    kinds = 1 + np.count_nonzero(np.diff(descending))
    if kinds > KINDS or len(descending) < 3 * kinds:
        return [], 0
    lengths, starts, counts = np.unique(-descending, return_index=True, return_counts=True)
    patterns, bound = cutting_stock((-lengths).tolist(), counts.tolist(), capacity)
    if not bound:
        return [], 0
    items, places = names.tolist(), starts.tolist()
    bins = []
    for pattern in patterns:
        bins.append([item for kind, used in enumerate(pattern) for item in items[places[kind] : places[kind] + used]])
        places = [place + used for place, used in zip(places, pattern, strict=True)]
    return bins, bound
