"""The fastest static and the fastest dynamic plan of a few sequences, by trying all: the oracle of the planner.

Shares nothing with the planner's searches: partitions are enumerated one by one, and the time of a group comes from
the cost model's coefficients and `local_tokens`, as for `predicted_seconds`. Seven sequences on eight ranks take some
50 ms.

1. Seconds of a set of sequences as one group of s ranks: infinite where a rank would hold more than the cap.
2. Static: over all partitions into sets, all sets on s ranks; sorted by time, W / s of them make a step, which is the
   best way to form steps of what runs side by side.
3. One step: over all partitions of its sequences into sets, the least time for which the fewest ranks that each set
   needs add up to at most W, found among the sets' own times by bisection.
4. Dynamic: over all partitions of the sequences into steps, the least sum.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations

import numpy as np

from dyncp.planning.cost import Coefficients, CostModel, Topology
from dyncp.planning.methods import METHODS, Method
from dyncp.planning.sizes import LAYOUTS, Layout, local_tokens

Set = tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """The arguments of `dyncp.plan`."""

    lengths: tuple[int, ...]
    world_size: int
    cap: int
    cost: CostModel = field(default_factory=CostModel)
    method: Method = "ring"
    layout: Layout = "contiguous"
    align: int = 1


class Exhaustive:
    """The optima of one question."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.pairs: list[float] = question.cost.pairs(np.array(question.lengths, dtype=np.int64)).tolist()
        self.sizes: dict[int, Coefficients] = {
            size: question.cost.coefficients(size, question.method, question.layout, Topology())
            for size in range(1, question.world_size + 1)
            if question.cost.allowed(size, question.method)
        }
        self._groups: dict[tuple[Set, int], float] = {}

    def group(self, samples: Set, size: int) -> float:
        """Return the seconds of one group."""
        if (samples, size) not in self._groups:
            question = self.question
            lengths = [question.lengths[i] for i in samples]
            fits = local_tokens(lengths, size, question.layout, question.align) <= question.cap
            seconds = self.sizes[size].seconds(sum(lengths), sum(self.pairs[i] for i in samples))
            self._groups[samples, size] = seconds if fits else float("inf")
        return self._groups[samples, size]

    def static(self) -> float:
        """Return the seconds of the fastest plan whose groups have one size; infinite where no size holds all."""
        world, best = self.question.world_size, float("inf")
        sizes = [size for size in self.sizes if world % size == 0]
        for sets in partitions(tuple(range(len(self.question.lengths)))):
            for size in sizes:
                times = sorted((self.group(samples, size) for samples in sets), reverse=True)
                if times and times[0] == float("inf"):
                    continue
                side_by_side = world // size
                idle = self.sizes[1].base if len(times) % side_by_side else 0.0
                firsts = times[::side_by_side]
                best = min(best, sum(firsts[:-1]) + max(firsts[-1], idle))
        return best

    def dynamic(self) -> float:
        """Return the seconds of the fastest plan of any groups."""
        step = cache(self._step)
        everything = tuple(range(len(self.question.lengths)))

        @cache
        def best(left: Set) -> float:
            return min((step(samples) + best(_rest(left, samples)) for samples in _with_first(left)), default=0.0)

        return best(everything)

    def _step(self, samples: Set) -> float:
        return min(self._side_by_side(sets) for sets in partitions(samples))

    def _side_by_side(self, sets: Sequence[Set]) -> float:
        """Return the least time in which the sets run side by side; idle ranks run dummies."""
        world, sizes = self.question.world_size, list(self.sizes)
        if len(sets) > world:
            return float("inf")
        rows = [[self.group(samples, size) for size in sizes] for samples in sets]
        times = sorted({value for row in rows for value in row if value < float("inf")})

        def ranks(time: float) -> int:
            return sum(next((s for s, v in zip(sizes, row, strict=True) if v <= time), world + 1) for row in rows)

        low, high = 0, len(times)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if ranks(times[middle]) <= world else (middle + 1, high)
        if low == len(times):
            return float("inf")
        idle = self.sizes[1].base if ranks(times[low]) < world else 0.0
        return max(times[low], idle)


def partitions(samples: Set) -> Iterator[list[Set]]:
    """Yield all partitions of the samples into sets."""
    if not samples:
        yield []
        return
    for first in _with_first(samples):
        for others in partitions(_rest(samples, first)):
            yield [first, *others]


def _with_first(samples: Set) -> Iterator[Set]:
    """Yield all subsets that hold the first sample."""
    for count in range(len(samples)):
        for others in combinations(samples[1:], count):
            yield (samples[0], *others)


def _rest(samples: Set, taken: Set) -> Set:
    return tuple(i for i in samples if i not in taken)


def small_questions(count: int, seed: int, min_samples: int = 1, max_samples: int = 7) -> Iterator[Question]:
    """Yield questions of `min_samples` to `max_samples` sequences on up to eight ranks of 1,024 tokens, of every method
    and layout.

    Fixed costs are from 0 to 30 ms. Lengths are uniform up to the widest group's room, or lognormal around 600.
    """
    rng = np.random.default_rng(seed)
    attention = replace(CostModel(), delta_layers=0, delta=0.0, attention_layers=8, query_heads=12, kv_heads=4)
    for _ in range(count):
        world, samples, cap = int(rng.integers(1, 9)), int(rng.integers(min_samples, max_samples + 1)), 1024
        method, layout = METHODS[rng.integers(len(METHODS))], LAYOUTS[rng.integers(len(LAYOUTS))]
        cost = attention if layout == "zigzag" or rng.random() < 0.3 else CostModel()
        fixed = rng.choice([0.0, 1e-3, 8e-3, 30e-3]) if rng.random() < 0.5 else rng.uniform(0.0, 30e-3)
        cost = replace(cost, fixed=float(fixed))
        align = int(rng.choice([1, 1, 1, 16, 128]))
        widest = max(size for size in range(1, world + 1) if cost.allowed(size, method))
        most = widest * cap - 2 * widest
        uniform = rng.integers(1, most + 1, samples)
        drawn = uniform if rng.random() < 0.5 else rng.lognormal(np.log(600), 1.0, samples).clip(1, most)
        yield Question(tuple(int(length) for length in drawn), world, cap, cost, method, layout, align)
