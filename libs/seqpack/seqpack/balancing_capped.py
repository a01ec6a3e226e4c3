"""Balance costs over a fixed number of slots that each hold a limited number of tokens."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from seqpack.balancing import total
from seqpack.bounds import Floats, Ints

WIDEST = 256
"""Of a slot with more items than this, only so many are tried in an exchange."""


def balance_capped(
    sizes: Sequence[int], costs: Sequence[float], slots: int, cap: int, start: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return `slots` lists of items, none above `cap` in size, with nearly equal costs.

    `start` is any feasible packing into at most `slots` bins: what is improved when dealing by cost runs out of
    room. Every step keeps the cap, so the result does by construction.
    """
    parts = costliest_first(sizes, costs, slots, cap)
    if parts is None:
        parts = [list(items) for items in start] + [[] for _ in range(slots - len(start))]
    exchange_capped(parts, np.array(sizes, dtype=np.int64), np.array(costs, dtype=np.float64), cap)
    return parts


def costliest_first(sizes: Sequence[int], costs: Sequence[float], slots: int, cap: int) -> list[list[int]] | None:
    """Give each item, the costliest first, to the cheapest slot that has room; None when no slot has.

    Slots without room for the present item wait, ordered by their room, until an item comes that fits.
    """
    parts: list[list[int]] = [[] for _ in range(slots)]
    room = [cap] * slots
    ready = [(0.0, slot) for slot in range(slots)]
    waiting: list[tuple[int, float, int]] = []
    for item in sorted(range(len(sizes)), key=lambda i: (-costs[i], -sizes[i], i)):
        size = sizes[item]
        while waiting and -waiting[0][0] >= size:
            _, load, slot = heappop(waiting)
            heappush(ready, (load, slot))
        while ready and room[ready[0][1]] < size:
            load, slot = heappop(ready)
            heappush(waiting, (-room[slot], load, slot))
        if not ready:
            return None
        load, slot = heappop(ready)
        parts[slot].append(item)
        room[slot] -= size
        heappush(ready, (load + costs[item], slot))
    return parts


def exchange_capped(parts: list[list[int]], sizes: Ints, costs: Floats, cap: int) -> int:
    """Even out the costs in place by moves and swaps that keep every part within `cap`; return how many were made.

    The heaviest part is relieved as far as lighter ones allow, then set aside, then the next: at most four
    exchanges a part.
    """
    loads = [total(costs, part) for part in parts]
    heap = [(-load, part) for part, load in enumerate(loads)]
    heapify(heap)
    done = 0
    while heap and done < 4 * len(parts):
        load, heavy = heappop(heap)
        if -load != loads[heavy]:
            continue  # an entry from before an exchange
        light = _relieve(heavy, parts, loads, sizes, costs, cap)
        if light is None:
            continue
        done += 1
        for part in (heavy, light):
            loads[part] = total(costs, parts[part])
            heappush(heap, (-loads[part], part))
    return done


def _relieve(
    heavy: int, parts: list[list[int]], loads: list[float], sizes: Ints, costs: Floats, cap: int
) -> int | None:
    """Make the best exchange of `heavy` with one of the eight lightest and return which; None when none helps."""
    lightest = np.argsort(loads, kind="stable")[:8].tolist()
    for light in lightest:
        difference = loads[heavy] - loads[light]
        if difference <= 1e-3 * loads[heavy]:
            return None
        pair = _best_pair(parts[heavy], parts[light], difference, sizes, costs, cap)
        if pair is not None:
            give, take = pair
            parts[heavy].remove(give)
            parts[light].append(give)
            if take is not None:
                parts[light].remove(take)
                parts[heavy].append(take)
            return int(light)
    return None


def _best_pair(
    heavy: list[int], light: list[int], difference: float, sizes: Ints, costs: Floats, cap: int
) -> tuple[int, int | None] | None:
    """Return the items to swap (None: nothing comes back) that bring both parts closest within the cap, or None."""
    gives, takes = heavy[:WIDEST], light[:WIDEST]
    give_sizes, give_costs = sizes[gives][:, None], costs[gives][:, None]
    take_sizes, take_costs = np.append(sizes[takes], 0), np.append(costs[takes], 0.0)
    grows = give_sizes - take_sizes  # tokens that go over
    fits = (sizes[light].sum() + grows <= cap) & (sizes[heavy].sum() - grows <= cap)
    off = np.where(fits, np.abs(give_costs - take_costs - difference / 2), np.inf)
    best = int(off.argmin())
    if not off.flat[best] < difference / 2 * (1 - 1e-9):
        return None
    give, take = divmod(best, len(takes) + 1)
    return gives[give], (takes[take] if take < len(takes) else None)
