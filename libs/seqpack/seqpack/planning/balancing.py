"""Balance costs over a fixed number of parts: longest first, then exchanges with the heaviest part."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush, heapreplace
from math import fsum

import numpy as np

from seqpack.planning.bounds import Floats, max_part_bound
from seqpack.planning.checks import Array, check_costs, check_positive_int
from seqpack.planning.plan_json import from_json, plan_hash, to_json

CLOSE_ENOUGH = 1e-4
"""Exchanges stop when the heaviest part is within this fraction of the lower bound."""


@dataclass(frozen=True)
class BalancePlan:
    """Parts of indices. `lower_bound` is what no assignment can beat for the heaviest part."""

    parts: tuple[tuple[int, ...], ...]
    costs: tuple[float, ...]
    lower_bound: float

    @property
    def loads(self) -> tuple[float, ...]:
        """The cost of each part."""
        return tuple(sum(self.costs[i] for i in part) for part in self.parts)

    @property
    def max_over_mean(self) -> float:
        """The heaviest part over the mean part; 1.0 is perfect (and the value for no cost at all)."""
        loads = self.loads
        mean = sum(loads) / len(loads)
        return max(loads) / mean if mean > 0 else 1.0

    @property
    def gap(self) -> float:
        """The heaviest part over the lower bound, minus one: 0.0 is proven optimal (up to rounding)."""
        return max(0.0, max(self.loads) / self.lower_bound - 1) if self.lower_bound > 0 else 0.0

    @cached_property
    def hash(self) -> int:
        """The 52-bit hash that ranks compare before they start."""
        return plan_hash(self.to_json())

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "BalancePlan":
        """Read what `to_json` wrote; ValueError for anything else."""
        return from_json(cls, text)


def balance(costs: Sequence[float] | Array, num_parts: int, equal_size: bool = False) -> BalancePlan:
    """Divide the costs into `num_parts` parts of nearly equal sums.

    With `equal_size` their counts differ by at most one. Deterministic. ValueError names the cost that is not finite.
    """
    count = check_positive_int(num_parts, "num_parts")
    values = check_costs(costs)
    order = np.argsort(-values, kind="stable")
    bound = max_part_bound(values[order], count, equal_size)
    greedy = _longest_first_equal if equal_size else _longest_first
    parts = greedy(values[order].tolist(), order.tolist(), count)
    exchange(parts, values, bound * (1 + CLOSE_ENOUGH), equal_size)
    return BalancePlan(tuple(map(tuple, parts)), tuple(values.tolist()), bound)


def _longest_first(descending: list[float], names: list[int], count: int) -> list[list[int]]:
    """Assign each cost to the lightest part so far."""
    parts: list[list[int]] = [[] for _ in range(count)]
    heap = [(0.0, part) for part in range(count)]
    for cost, name in zip(descending, names, strict=True):
        load, part = heap[0]
        parts[part].append(name)
        heapreplace(heap, (load + cost, part))
    return parts


def _longest_first_equal(descending: list[float], names: list[int], count: int) -> list[list[int]]:
    """Assign each cost to the lightest part with a free place; `len % count` parts have one place more."""
    parts: list[list[int]] = [[] for _ in range(count)]
    heap = [(0.0, part) for part in range(count)]
    small, larger = divmod(len(names), count)
    for cost, name in zip(descending, names, strict=True):
        load, part = heappop(heap)
        parts[part].append(name)
        if len(parts[part]) == small + 1:
            larger -= 1
            if larger == 0:
                heap = [entry for entry in heap if len(parts[entry[1]]) < small]
                heapify(heap)
        if len(parts[part]) < small + (larger > 0):
            heappush(heap, (load + cost, part))
    return parts


def exchange(parts: list[list[int]], costs: Floats, target: float, equal_size: bool) -> int:
    """Lower the heaviest part in place, by swaps with (or moves to) a lighter one, and return the number of exchanges.

    Each step takes the exchange that brings the heaviest part and its partner closest together. It ends when the
    heaviest part is at most `target`, no lighter part helps it, or after eight steps a part.
    """
    loads = np.array([total(costs, part) for part in parts])
    for step in range(8 * len(parts)):
        heavy = int(loads.argmax())
        if loads[heavy] <= target:
            return step
        for light in np.argsort(loads, kind="stable").tolist():
            may_move = not equal_size or len(parts[heavy]) > len(parts[light])
            pair = best_exchange(costs[parts[heavy]], costs[parts[light]], loads[heavy] - loads[light], may_move)
            if pair is None:
                continue
            give, take = pair
            moved = parts[heavy].pop(give)
            taken = None if take is None else parts[light].pop(take)
            parts[light].append(moved)
            if taken is not None:
                parts[heavy].append(taken)
            loads[heavy], loads[light] = total(costs, parts[heavy]), total(costs, parts[light])
            break
        else:
            return step
    return 8 * len(parts)


def total(costs: Floats, part: list[int]) -> float:
    """Return the sum of a part's costs, rounded once: the same on every machine, in every order."""
    return fsum(costs[part].tolist())


def best_exchange(heavy: Floats, light: Floats, difference: float, may_move: bool) -> tuple[int, int | None] | None:
    """Return the positions (in heavy, in light) whose swap brings both closest; (i, None) is a move; None is no gain.

    A swap changes the difference by twice what it moves over, so it should move half the difference, and less than
    all of it.
    """
    others = np.concatenate([light, [0.0]]) if may_move else light  # the last stands for taking nothing back
    if not len(heavy) or not len(others) or difference <= 0:
        return None
    order = np.argsort(others, kind="stable")
    ordered = others[order]
    wanted = heavy - difference / 2
    above = np.searchsorted(ordered, wanted).clip(0, len(ordered) - 1)
    below = (above - 1).clip(0)
    choices = np.stack([above, below])
    off = np.abs(heavy - ordered[choices] - difference / 2)
    side, give = divmod(int(off.argmin()), len(heavy))
    if off[side, give] >= difference / 2 * (1 - 1e-9):
        return None
    take = int(order[choices[side, give]])
    return give, (take if take < len(light) else None)
