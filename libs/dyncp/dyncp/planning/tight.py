"""Few sequences into few groups by tokens alone: each group as full as any choice of sequences can make it.

The longest sequence left opens a group; of the others those join whose sum is the largest that still fits, found among
all sums that any of them have: bit t of an integer says that some choice has t tokens. Tokens are counted in units, so
that such an integer has at most `MOST_UNITS` bits, and rounded up, so that what fits in units fits.
"""

from collections.abc import Sequence

from dyncp.planning.sizes import ceil_div

MOST_UNITS = 16_384


def tight_bins(tokens: Sequence[int], room: int) -> list[list[int]]:
    """Places of the sequences in every group; each of `tokens` must be at most `room`."""
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


def _fullest(weights: Sequence[int], room: int) -> set[int]:
    """Places of the weights whose sum is the largest up to `room`; of equal sums one with few, long ones."""
    reached, mask = [1], (1 << room + 1) - 1
    for weight in weights:
        reached.append((reached[-1] | reached[-1] << weight) & mask)
    total, chosen = reached[-1].bit_length() - 1, set()
    for place in range(len(weights) - 1, -1, -1):
        weight = weights[place]
        if weight <= total and reached[place] >> (total - weight) & 1:
            chosen.add(place)
            total -= weight
    return chosen
