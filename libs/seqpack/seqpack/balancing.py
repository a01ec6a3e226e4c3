"""Balance costs over a fixed number of parts."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from seqpack.checks import check_costs, check_positive_int


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


def balance(costs: Sequence[float], num_parts: int, equal_size: bool = False) -> BalancePlan:
    """Deal the costs into `num_parts` parts of nearly equal sums.

    With `equal_size` their counts differ by at most one. Deterministic. ValueError names the cost that is not finite.
    """
    count = check_positive_int(num_parts, "num_parts")
    values = check_costs(costs)
    order = sorted(range(len(values)), key=values.__getitem__, reverse=True)
    parts: list[list[int]] = [[] for _ in range(count)]
    heap = [(0.0, part) for part in range(count)]
    small, larger = divmod(len(values), count)  # `larger` parts may still take one more than `small`
    for index in order:
        load, part = heapq.heappop(heap)
        parts[part].append(index)
        if equal_size and len(parts[part]) == small + 1:
            larger -= 1
            if larger == 0:
                heap = [entry for entry in heap if len(parts[entry[1]]) < small]
                heapq.heapify(heap)
        if not equal_size or len(parts[part]) < small + (larger > 0):
            heapq.heappush(heap, (load + values[index], part))
    bound = max(sum(values) / count, max(values, default=0.0))
    return BalancePlan(tuple(tuple(sorted(part)) for part in parts), tuple(values), bound)
