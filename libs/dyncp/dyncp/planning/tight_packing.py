"""Few sequences into few groups by tokens alone: each group as full as any choice of sequences can make it.

The longest sequence left opens a group; of the others those join whose sum is the largest that still fits, found among
all sums that any of them have: bit t of an integer says that some choice has t tokens. Tokens are counted in units, so
that such an integer has at most `MOST_UNITS` bits, and rounded up, so that what fits in units fits.

`tight_bins` fills group after group once. `completed_bins` is asked for a number of groups: it tries a group's other
fillings too, fullest first, as long as no more room is left empty than so many groups have to spare.
"""

from collections.abc import Iterator, Sequence

from dyncp.planning.sizes import ceil_div

MOST_UNITS = 16_384
MAX_FILLS = 5000
"""Fillings of a group that `completed_bins` tries, times sequences: some ten milliseconds."""


def tight_bins(tokens: Sequence[int], room: int) -> list[list[int]]:
    """Return the indices of the sequences of every group; each of `tokens` must be at most `room`."""
    unit = ceil_div(room, MOST_UNITS)
    weights, whole = [ceil_div(n, unit) for n in tokens], room // unit
    left = sorted(range(len(tokens)), key=lambda i: (tokens[i], -i))
    bins = []
    while left:
        first = left.pop()
        joined = _fullest([weights[i] for i in left], max(0, whole - weights[first]))
        bins.append([first, *(left[place] for place in joined)])
        left = [i for place, i in enumerate(left) if place not in joined]
    return bins


def completed_bins(tokens: Sequence[int], room: int, bins: int) -> list[list[int]] | None:
    """Return the indices of the sequences of at most `bins` groups; None where no filling that was tried fits."""
    unit = ceil_div(room, MOST_UNITS)
    weights, whole = [ceil_div(n, unit) for n in tokens], room // unit
    tries = MAX_FILLS // max(1, len(tokens))

    def fill(left: list[int], spare: int) -> list[list[int]] | None:
        """Return groups of these indices, shortest first, with at most `spare` units left empty."""
        nonlocal tries
        if not left:
            return []
        *others, first = left
        most = whole - weights[first]
        for total, joined in _fillings([weights[i] for i in others], max(0, most - spare), most):
            tries -= 1
            if tries < 0:
                return None
            rest = fill([i for place, i in enumerate(others) if place not in joined], spare - (most - total))
            if rest is not None:
                return [[first, *(others[place] for place in joined)], *rest]
        return None

    spare = bins * whole - sum(weights)
    order = sorted(range(len(tokens)), key=lambda i: (tokens[i], -i))
    return fill(order, spare) if spare >= 0 and max(weights, default=0) <= whole else None


def _fillings(weights: Sequence[int], least: int, most: int) -> Iterator[tuple[int, set[int]]]:
    """Yield (sum, indices) of weights with a sum in `least`..`most`: the largest sum first, then the longest ones."""
    reached = _sums(weights, most)

    def choices(place: int, total: int) -> Iterator[set[int]]:
        if not place:
            yield set()
            return
        weight = weights[place - 1]
        if weight <= total and reached[place - 1] >> (total - weight) & 1:
            for chosen in choices(place - 1, total - weight):
                yield chosen | {place - 1}
        if reached[place - 1] >> total & 1:
            yield from choices(place - 1, total)

    for total in range(most, least - 1, -1):
        if reached[-1] >> total & 1:
            for chosen in choices(len(weights), total):
                yield total, chosen


def _sums(weights: Sequence[int], room: int) -> list[int]:
    """Return an integer for every prefix of the weights: bit t <= room is set where some of them have the sum t."""
    reached, mask = [1], (1 << room + 1) - 1
    for weight in weights:
        reached.append((reached[-1] | reached[-1] << weight) & mask)
    return reached


def _fullest(weights: Sequence[int], room: int) -> set[int]:
    """Return the indices of weights with the largest sum up to `room`; of equal sums one with few, long weights."""
    reached = _sums(weights, room)
    total, chosen = reached[-1].bit_length() - 1, set()
    for place in range(len(weights) - 1, -1, -1):
        weight = weights[place]
        if weight <= total and reached[place] >> (total - weight) & 1:
            chosen.add(place)
            total -= weight
    return chosen
