"""Balance costs over a fixed number of slots (micro-batches) that each hold a limited number of tokens.

Slots lie in levels of `together`: those of one level run at the same time, one a rank, and every rank waits for the
costliest of them. What should be small is the sum over the levels of the costliest slot.

1. Deal the items, the costliest first, each to the cheapest slot that has room (longest processing time first, Graham
   1969, under a cap). If some item finds no room, start from the caller's packing, which is feasible.
2. Even out all slots in rounds. A round takes the costliest slots above the mean, `AT_A_TIME` of them, and looks at all
   moves and swaps of one item with the `PARTNERS` cheapest slots that keep both within the cap. Each costly slot makes
   the one that brings the two closest, with the cheapest partner that helps and is not taken in this round. A slot that
   none helps is left as it is. Few slots a round matter: partners further up have less to give. Only among more than
   `TEAM` slots do several teams of them work at once.
3. Sort the slots by cost into levels, and even out every level by itself in the same way, all levels at once.

A round is array work on (its slots) x PARTNERS x WIDEST^2 numbers and a sort of the slots; there are at most `ROUNDS`,
and each slot is left once, so that all together is O(n log n).

Invariants that the tests assert: every item is in exactly one slot; no slot is over the cap, before or after a round;
no round raises the cost of the costliest slot of a level. Costs are counted in integers, so that sums are exact and
every machine takes the same decisions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import fsum

import numpy as np
from numpy.typing import NDArray

from seqpack.planning.bounds import Floats, Ints

WIDEST = 32
"""Of a slot with more items than this, only so many are tried, evenly spaced from the costliest to the cheapest."""
PARTNERS = 8
"""Cheap slots that a costly one tries to exchange with before it is left as it is."""
AT_A_TIME = 16
"""Costly slots that are tried in a round, of each team."""
TEAM = 512
"""Slots of a team: more slots than this are worked on by several at once."""
ROUNDS = 512
"""At most so many rounds; 65,536 items in 12,288 slots take thirty."""
UNEVEN = 2e-4
"""Slots this much apart, as a share of the costlier one, are worth an exchange."""
UNITS = 2**52
"""All costs together, counted in integer units: half of what a float64 or int64 sum holds exactly."""
SPARE = 8
"""Free places in the table beyond the widest slot."""
AT_ONCE = 64
"""Pairs of slots whose exchanges are looked at in one go."""


def balance_capped(
    sizes: Sequence[int],
    costs: Sequence[float],
    slots: int,
    cap: int,
    start: Sequence[Sequence[int]],
    together: int = 1,
) -> list[list[int]]:
    """Return `slots` lists of items, none above `cap` in size, the costliest slot first.

    `start` is any packing of the items within the cap into at most `slots` bins, used where dealing by cost runs out of
    room. `slots` is a multiple of `together`, the slots that run at the same time.
    """
    units = cost_units(costs)
    parts = largest_cost_first(sizes, units.tolist(), slots, cap)
    if parts is None:
        parts = [list(items) for items in start] + [[] for _ in range(slots - len(start))]
    state = Slots.of(parts, np.array(sizes, dtype=np.int64), units, cap)
    even_out(state, slots)
    for _ in range(2):  # what was left may be helped after all: others have changed since
        even_out(state, together)
    return [state.items_of(slot) for slot in np.argsort(-state.loads, kind="stable").tolist()]


def cost_units(costs: Sequence[float]) -> Ints:
    """Return the costs as integers that add up to about 2**52; all zero where nothing costs anything."""
    total = fsum(costs)
    values: Floats = np.array(costs, dtype=np.float64)
    return np.rint(values / total * UNITS).astype(np.int64) if total > 0 else np.zeros(len(values), dtype=np.int64)


def largest_cost_first(sizes: Sequence[int], costs: Sequence[int], slots: int, cap: int) -> list[list[int]] | None:
    """Assign each item, the costliest first, to the cheapest slot that has room; return None when no slot has.

    Slots without room for the present item wait, ordered by their room, until an item comes that fits.
    """
    parts: list[list[int]] = [[] for _ in range(slots)]
    room = [cap] * slots
    ready = [(0, slot) for slot in range(slots)]
    waiting: list[tuple[int, int, int]] = []
    for item in np.lexsort((-np.array(sizes), -np.array(costs))).tolist():
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


@dataclass(frozen=True)
class Slots:
    """The state of the exchanges, changed in place.

    `table`: [slots, width] the items of each slot that may be exchanged, the first `counts` of each row, then -1.
    `fixed`: the other items of wide slots. `sizes`, `costs`: of the items, with a zero appended, which is what -1
    finds. `loads`: [slots] cost units; `room`: [slots] tokens free.
    """

    table: Ints
    counts: Ints
    fixed: dict[int, list[int]]
    sizes: Ints
    costs: Ints
    loads: Ints
    room: Ints

    @classmethod
    def of(cls, parts: Sequence[Sequence[int]], sizes: Ints, costs: Ints, cap: int) -> "Slots":
        """Build the slots of these parts."""
        shown, fixed = [list(part) for part in parts], {}
        for slot, part in enumerate(shown):
            if len(part) > WIDEST:
                part.sort(key=lambda item: (-costs[item], item))
                chosen = set(np.linspace(0, len(part) - 1, WIDEST).astype(np.int64).tolist())
                fixed[slot] = [item for place, item in enumerate(part) if place not in chosen]
                shown[slot] = [part[place] for place in sorted(chosen)]
        lengths = np.array([len(part) for part in shown], dtype=np.int64)
        table = np.full((len(parts), int(lengths.max(initial=0)) + SPARE), -1, dtype=np.int64)
        table[np.arange(table.shape[1]) < lengths[:, None]] = [item for part in shown for item in part]
        sizes, costs = np.append(sizes, 0), np.append(costs, 0)
        loads, used = costs[table].sum(1), sizes[table].sum(1)
        for slot, rest in fixed.items():
            loads[slot] += costs[rest].sum()
            used[slot] += sizes[rest].sum()
        return cls(table, lengths, fixed, sizes, costs, loads, cap - used)

    def items_of(self, slot: int) -> list[int]:
        """Return the items of a slot."""
        return [*self.table[slot, : self.counts[slot]].tolist(), *self.fixed.get(slot, ())]


def even_out(slots: Slots, together: int) -> int:
    """Exchange items within levels of `together` slots, the costliest first; return how many exchanges were made."""
    levels = np.argsort(-slots.loads, kind="stable").reshape(-1, together)
    means = slots.loads[levels].sum(1, keepdims=True) // together
    left = np.zeros(len(slots.loads), dtype=bool)
    made = 0
    for _ in range(ROUNDS):
        heavy, partners = _candidates(slots.loads, levels, means, left)
        if not len(heavy):
            break
        exchanges, hopeless = _choose(slots, heavy, partners)
        _swap(slots, *exchanges)
        left[hopeless] = True
        made += exchanges.shape[1]
    return made


def _candidates(loads: Ints, levels: Ints, means: Ints, left: NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Return the costliest slots of each level, [n], and the cheapest ones for each, [n, PARTNERS], or -1.

    The c-th of the costliest and of the cheapest slots is in team c modulo the number of teams.
    """
    width = levels.shape[1]
    teams = max(1, width // TEAM)
    ranking = np.where(left[levels], means, loads[levels])  # the mean is neither above nor below
    order = np.argsort(-ranking, axis=1, kind="stable")
    above = (ranking - means > means * UNEVEN).sum(1, keepdims=True)
    below = (ranking < means).sum(1, keepdims=True)
    row, column = np.nonzero(np.arange(width) < np.minimum(above, AT_A_TIME * teams))
    number = column[:, None] % teams + np.arange(PARTNERS) * teams
    cheap = levels[row[:, None], order[row[:, None], width - 1 - np.minimum(number, width - 1)]]
    return levels[row, order[row, column]], np.where(number < below[row], cheap, -1)


def _choose(slots: Slots, heavy: Ints, partners: Ints) -> tuple[Ints, Ints]:
    """Choose this round's exchanges, [4, n]: slot, partner and the place in each, no slot twice; and the hopeless.

    Each slot in turn takes the cheapest partner that helps it and that no slot before it took. A slot that no partner
    helps is hopeless; one whose partners were all taken has its turn in the next round.
    """
    pair, column = np.nonzero(partners >= 0)
    mine, light = heavy[pair], partners[pair, column]
    order = np.lexsort((slots.counts[mine], slots.counts[light]))  # like widths together, for little padding
    best = np.empty((3, len(order)), dtype=np.int64)
    for start in range(0, len(order), AT_ONCE):
        chosen = order[start : start + AT_ONCE]
        best[:, chosen] = _best_exchanges(slots, mine[chosen], light[chosen])
    helping = np.flatnonzero(best[0] < slots.loads[mine])
    busy: set[int] = set()
    exchanges = []
    for i, slot, partner in zip(helping.tolist(), mine[helping].tolist(), light[helping].tolist(), strict=True):
        if slot not in busy and partner not in busy:
            busy |= {slot, partner}
            exchanges.append(i)
    hopeless = np.ones(len(heavy), dtype=bool)
    hopeless[pair[helping]] = False
    return np.stack([mine[exchanges], light[exchanges], *best[1:, exchanges]]), heavy[hopeless]


def _best_exchanges(slots: Slots, heavy: Ints, light: Ints) -> tuple[Ints, Ints, Ints]:
    """Return, for each pair, the higher load after its best exchange within both caps, and the two places.

    An item of heavy goes over for one of light, or for nothing where the place is empty.
    """
    gives = slots.table[heavy, : slots.counts[heavy].max()]
    takes = slots.table[light, : slots.counts[light].max() + 1]
    moved = slots.costs[gives][:, :, None] - slots.costs[takes][:, None, :]
    worst = np.maximum(slots.loads[heavy][:, None, None] - moved, slots.loads[light][:, None, None] + moved)
    grows = slots.sizes[gives][:, :, None] - slots.sizes[takes][:, None, :]
    worst[(grows > slots.room[light][:, None, None]) | (-grows > slots.room[heavy][:, None, None])] = 2 * UNITS
    worst = worst.reshape(len(heavy), -1)
    best = worst.argmin(1)
    give, take = np.divmod(best, takes.shape[1])
    return worst[np.arange(len(heavy)), best], give, take


def _swap(slots: Slots, heavy: Ints, light: Ints, give: Ints, take: Ints) -> None:
    """Exchange the items at these places; where the place of light is empty, the item of heavy just moves over."""
    given, taken = slots.table[heavy, give], slots.table[light, take]
    slots.table[heavy, give], slots.table[light, take] = taken, given
    for slot, sign in ((heavy, -1), (light, 1)):
        slots.loads[slot] += sign * (slots.costs[given] - slots.costs[taken])
        slots.room[slot] -= sign * (slots.sizes[given] - slots.sizes[taken])
    moves = taken < 0
    slots.counts[light[moves]] += 1
    slots.counts[heavy[moves]] -= 1
    last = slots.counts[heavy[moves]]
    slots.table[heavy[moves], give[moves]] = slots.table[heavy[moves], last]
    slots.table[heavy[moves], last] = -1
