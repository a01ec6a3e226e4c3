"""Balance costs over a fixed number of slots that each hold a limited number of tokens."""

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from seqpack.planning.balancing import total
from seqpack.planning.bounds import Floats, Ints

WIDEST = 256
"""Of a slot with more items than this, only so many are tried in an exchange."""


UNEVEN = 1e-3
"""Parts this much apart, as a share of the heavier one, are worth an exchange."""


def balance_capped(
    sizes: Sequence[int],
    costs: Sequence[float],
    slots: int,
    cap: int,
    start: Sequence[Sequence[int]],
    together: int = 1,
) -> list[list[int]]:
    """Return `slots` lists of items, none above `cap` in size, with nearly equal costs.

    `start` is any feasible packing into at most `slots` bins: what is improved when dealing by cost runs out of
    room. Every step keeps the cap, so the result does by construction. Costliest slots come first; those that run
    at the same time, `together` of them in this order, are evened out among themselves.
    """
    parts = costliest_first(sizes, costs, slots, cap)
    if parts is None:
        parts = [list(items) for items in start] + [[] for _ in range(slots - len(start))]
    size_array, cost_array = np.array(sizes, dtype=np.int64), np.array(costs, dtype=np.float64)
    exchange_capped(parts, size_array, cost_array, cap)
    return _even_levels(parts, size_array, cost_array, cap, together)


def _even_levels(parts: list[list[int]], sizes: Ints, costs: Floats, cap: int, together: int) -> list[list[int]]:
    """Sort the parts, the costliest first, and even out each run of `together`: ranks wait for its costliest."""
    loads = [total(costs, part) for part in parts]
    order = sorted(range(len(parts)), key=lambda part: -loads[part])
    for start in range(0, len(parts), together):
        level = order[start : start + together]
        mean = sum(loads[part] for part in level) / len(level)
        if loads[level[0]] - mean > UNEVEN * mean:
            exchange_capped([parts[part] for part in level], sizes, costs, cap)
    return [parts[part] for part in order]


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
    slots = [_Slot(part, sizes, costs, cap) for part in parts]
    loads = np.array([slot.load for slot in slots])
    heap = [(-slot.load, number) for number, slot in enumerate(slots)]
    heapify(heap)
    done = 0
    while heap and done < 4 * len(parts):
        load, heavy = heappop(heap)
        if -load != loads[heavy]:
            continue  # an entry from before an exchange
        light = _relieve(heavy, slots, loads)
        if light is None:
            continue
        done += 1
        for number in (heavy, light):
            slots[number] = _Slot(parts[number], sizes, costs, cap)
            loads[number] = slots[number].load
            heappush(heap, (-slots[number].load, number))
    return done


class _Slot:
    """A part with its sizes and costs as arrays, each with a zero at the end: what stands for taking nothing back."""

    __slots__ = ("costs", "items", "load", "room", "sizes")

    def __init__(self, items: list[int], sizes: Ints, costs: Floats, cap: int) -> None:
        tried = items[:WIDEST]
        self.items = items
        self.sizes = np.zeros(len(tried) + 1, dtype=np.int64)
        self.costs = np.zeros(len(tried) + 1)
        self.sizes[:-1], self.costs[:-1] = sizes[tried], costs[tried]
        self.load = total(costs, items)
        self.room = cap - int(sizes[items].sum())


def _relieve(heavy: int, slots: list[_Slot], loads: Floats) -> int | None:
    """Make the best exchange of `heavy` with one of the eight lightest and return which; None when none helps."""
    giver = slots[heavy]
    for light in np.argsort(loads, kind="stable")[:8].tolist():
        taker = slots[light]
        if giver.load - taker.load <= UNEVEN * giver.load:
            return None
        pair = _best_pair(giver, taker)
        if pair is not None:
            give, take = pair
            given, taken = giver.items[give], taker.items[take] if take < len(taker.sizes) - 1 else None
            giver.items.remove(given)
            taker.items.append(given)
            if taken is not None:
                taker.items.remove(taken)
                giver.items.append(taken)
            return int(light)
    return None


def _best_pair(heavy: _Slot, light: _Slot) -> tuple[int, int] | None:
    """Return the positions to swap (the last of light: nothing comes back) that bring both closest, or None."""
    half = (heavy.load - light.load) / 2
    grows = heavy.sizes[:-1, None] - light.sizes  # tokens that go over
    off = np.abs(heavy.costs[:-1, None] - light.costs - half)
    off[(grows > light.room) | (grows < -heavy.room)] = np.inf
    best = int(off.argmin()) if len(off) else 0
    if not len(off) or not off.flat[best] < half * (1 - 1e-9):
        return None
    return divmod(best, len(light.sizes))
