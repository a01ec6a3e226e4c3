"""Balance costs over a fixed number of slots that each hold a limited number of tokens."""

import heapq
from collections.abc import Sequence


def balance_capped(
    sizes: Sequence[int], costs: Sequence[float], slots: int, cap: int, start: Sequence[Sequence[int]]
) -> list[list[int]]:
    """Return `slots` lists of items, none above `cap` in size, with nearly equal costs.

    `start` is any feasible packing into at most `slots` bins; it is the fallback when balancing by cost runs out of
    room, so the cap holds by construction.
    """
    greedy = _heaviest_first(sizes, costs, slots, cap)
    if greedy is not None:
        return greedy
    return [list(items) for items in start] + [[] for _ in range(slots - len(start))]


def _heaviest_first(sizes: Sequence[int], costs: Sequence[float], slots: int, cap: int) -> list[list[int]] | None:
    """Put the costliest item first, each into the cheapest slot that has room; None when there is none."""
    parts: list[list[int]] = [[] for _ in range(slots)]
    room = [cap] * slots
    heap = [(0.0, slot) for slot in range(slots)]
    for item in sorted(range(len(sizes)), key=lambda i: (-costs[i], -sizes[i], i)):
        skipped = []
        while heap and room[heap[0][1]] < sizes[item]:
            skipped.append(heapq.heappop(heap))
        if not heap:
            return None
        load, slot = heapq.heappop(heap)
        parts[slot].append(item)
        room[slot] -= sizes[item]
        heapq.heappush(heap, (load + costs[item], slot))
        for entry in skipped:
            heapq.heappush(heap, entry)
    return parts
