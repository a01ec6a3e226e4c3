"""A batch sampler for a map dataset: each batch is the samples of one packed row, the same number on every rank."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import cycle, islice, pairwise
from typing import Any, Literal

import numpy as np

from seqpack.planning.checks import check_costs, check_lengths, check_positive_int
from seqpack.planning.micro_batches import Cost, plan_micro_batches
from seqpack.planning.packing import pack
from seqpack.planning.padding import aligned_length, check_aligned, frozen_bucket, usable_capacity
from seqpack.planning.plan_json import plan_hash

Row = tuple[int, ...]
Step = tuple[Row, ...]
_PLANS = 2
"""Raised when the same arguments give other rows than before: states of then do not hold."""


class PackedBatchSampler:
    """A batch sampler of lists of indices, each at most `max_tokens` long when packed: `DataLoader(batch_sampler=...)`.

    Strategy
    1. The order of an epoch is a permutation by (`seed`, `epoch`), or the dataset's own without `shuffle`.
    2. It is cut into windows of `window` samples; each is planned by `plan_micro_batches` over all ranks, so that rows
       are few, under the cap after padding (`align`, `bucket`), and balanced by `cost`.
    3. The rows that run at the same time on the ranks (a step) stay together; the order of a window's steps is drawn.
    4. Where samples are fewer than places in a step, the places are filled with rows of the epoch again, or with
       `drop_last` the step is left out: every rank yields the same number of rows. `repeated` and `dropped` say it.
    5. Every epoch has the same number of rows, which trainers ask for once, before the first: windows of another epoch
       need a few more or fewer. Where an epoch has fewer, steps are cut in two; where it would have more, it is planned
       as one window (with `drop_last`, steps are left out).

    The plan is a pure function of the arguments and the epoch: every rank computes the same. `set_epoch` draws a new
    order. `state_dict` and `load_state_dict` resume in the middle of an epoch; with workers a DataLoader runs ahead of
    what was trained, so say then how many rows were: `state_dict(rows)`. ValueError names the sample over the cap.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_tokens: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        window: int = 16384,
        cost: Cost | None = None,
        align: int = 1,
        bucket: int | Sequence[int] | None = None,
        overlong: Literal["error", "drop"] = "error",
        empty: Literal["error", "drop"] = "error",
    ) -> None:
        for name, choice in (("overlong", overlong), ("empty", empty)):
            if choice not in ("error", "drop"):
                raise ValueError(f"{name} must be 'error' or 'drop', got {choice!r}")
        self.lengths = check_lengths(lengths, minimum=0 if empty == "drop" else 1)
        self.max_tokens = check_positive_int(max_tokens, "max_tokens")
        self.world_size = check_positive_int(world_size, "world_size")
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must be in 0..{self.world_size - 1}, got {rank}")
        self.rank, self.shuffle, self.seed, self.drop_last = rank, shuffle, seed, drop_last
        self.window = check_positive_int(window, "window")
        if cost is not None and not callable(cost) and len(check_costs(cost, "cost")) != len(self.lengths):
            raise ValueError(
                f"cost has {len(cost)} numbers for {len(self.lengths)} samples: one a sample, or a function"
            )
        self.cost, self.align, self.bucket = cost, align, frozen_bucket(bucket)
        usable = usable_capacity(self.max_tokens, align, bucket)
        if overlong == "error":
            check_aligned([max(1, length) for length in self.lengths], align, usable)
        sizes = enumerate(self.lengths)
        self.kept = [i for i, length in sizes if 0 < aligned_length(length, align) <= usable]
        """Samples that fit a row."""
        if len(self.kept) < self.world_size:
            raise ValueError(f"{len(self.kept)} samples are too few for {self.world_size} ranks")
        if self.window < self.world_size:
            raise ValueError(f"window={self.window} is under the {self.world_size} ranks: no step could be filled")
        self.epoch = 0
        self._start = 0
        self._yielded = 0
        self._planned: tuple[int, list[Step]] | None = None

    @cached_property
    def fingerprint(self) -> int:
        """The 52-bit hash of all that an epoch's plan depends on except the rank; states and ranks compare it."""
        costs = None if self.cost is None else [float(c) for c in self._costs(self.kept)]
        parts = (self.lengths, self.max_tokens, self.world_size, self.shuffle, self.seed, self.drop_last, self.window)
        return plan_hash(repr((*parts, costs, self.align, self.bucket, len(self.kept), _PLANS)))

    @property
    def steps(self) -> list[Step]:
        """The rows of this epoch: one a rank in each step."""
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = (self.epoch, self._plan(self.epoch))
        return self._planned[1]

    @property
    def repeated(self) -> int:
        """Number of samples that this epoch yields more than once, over all ranks."""
        yielded = [i for step in self.steps for row in step for i in row]
        return len(yielded) - len(set(yielded))

    @property
    def dropped(self) -> int:
        """Number of samples that are left out of this epoch."""
        return len(self.lengths) - len({i for step in self.steps for row in step for i in row})

    def __len__(self) -> int:
        """Return the number of rows of each rank, in every epoch."""
        return self._length

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's rows, from the place in a loaded state."""
        self._yielded, self._start = self._start, 0
        return self._rows(self._yielded)

    def _rows(self, start: int) -> Iterator[list[int]]:
        steps = self.steps
        for number in range(start, len(steps)):
            self._yielded = number + 1
            yield list(steps[number][self.rank])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that is iterated next; the place in a loaded state holds for its own epoch alone."""
        if epoch != self.epoch:
            self.epoch, self._start, self._yielded = epoch, 0, 0

    def state_dict(self, rows: int | None = None) -> dict[str, Any]:
        """Return the state of this epoch after `rows` of this rank's rows, or after those yielded so far."""
        done = self._yielded if rows is None else rows
        if not 0 <= done <= len(self):
            raise ValueError(f"rows must be in 0..{len(self)}, the rows of this epoch, got {done}")
        return {"epoch": self.epoch, "rows": done, "fingerprint": self.fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, taken on any rank. Raise ValueError for one of other samples or settings."""
        for key in ("epoch", "rows", "fingerprint"):
            value = state.get(key)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{key!r} of a state of PackedBatchSampler is {value!r}: hand what state_dict() gave")
        if state["fingerprint"] != self.fingerprint:
            raise ValueError(
                "this state is of other samples, ranks or settings than this sampler's: make the sampler as it was "
                "made then, or begin a new epoch"
            )
        planned = self._plan(state["epoch"])
        if state["rows"] > len(planned):
            raise ValueError(f"the state is after row {state['rows']} of an epoch of {len(planned)} rows")
        self.epoch, self._planned = state["epoch"], (state["epoch"], planned)
        self._start = self._yielded = state["rows"]

    @cached_property
    def _length(self) -> int:
        steps, windows = self._drawn(0), -(-len(self.kept) // self.window)
        if not self.shuffle or windows == 1:
            return len(steps)
        # Each window rounds up to a whole step: where windows are many, a few steps spare the plan as one window.
        spare = min(math.isqrt(windows) // 4, sum(map(_divisible, steps)))
        rows = pack([self.lengths[i] for i in self.kept], self.max_tokens, self.align, self.bucket).bins
        return max(len(steps) + spare, -(-len(rows) // self.world_size))

    def _plan(self, epoch: int) -> list[Step]:
        """Return the steps of an epoch, each with a row for every rank: `_length` of them."""
        steps = self._drawn(epoch)
        if len(steps) > self._length and not self.drop_last:
            steps = self._filled(self._window(self._order(epoch), np.random.default_rng([self.seed, epoch, 2])))
        steps = steps[: self._length]
        while missing := self._length - len(steps):
            widest = sorted(filter(_divisible, steps), key=lambda step: -min(map(len, step)))[:missing]
            halves = {step: [tuple(row[half::2] for row in step) for half in range(2)] for step in widest}
            if not halves:
                return [*steps, *islice(cycle(steps), missing)]
            steps = [half for step in steps for half in halves.pop(step, [step])]
        return steps

    def _order(self, epoch: int) -> list[int]:
        """Return the samples in the order of an epoch."""
        if not self.shuffle:
            return self.kept
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self.kept))
        return [self.kept[i] for i in order.tolist()]

    def _drawn(self, epoch: int) -> list[Step]:
        """Return the steps of an epoch as its windows give them."""
        order, rng = self._order(epoch), np.random.default_rng([self.seed, epoch, 1])
        edges = [*range(0, len(order), self.window), len(order)]
        if len(edges) > 2 and edges[-1] - edges[-2] < self.world_size:
            del edges[-2]  # too few for a step of their own: they join the window before
        steps: list[Step] = []
        for start, stop in pairwise(edges):
            steps += self._window(order[start:stop], rng)
        return self._filled(steps)

    def _window(self, samples: list[int], rng: np.random.Generator) -> list[Step]:
        lengths = [self.lengths[i] for i in samples]
        costs = None if self.cost is None else self._costs(samples)
        plan = plan_micro_batches(
            lengths, self.max_tokens, self.world_size, costs, align=self.align, bucket=self.bucket
        )
        steps = [tuple(tuple(samples[i] for i in row) for row in step) for step in zip(*plan.ranks, strict=True)]
        if self.shuffle:
            return [steps[i] for i in rng.permutation(len(steps)).tolist()]
        return sorted(steps, key=lambda step: min(min(row, default=max(samples) + 1) for row in step))

    def _costs(self, samples: Sequence[int]) -> list[float]:
        if callable(self.cost):
            return [self.cost(self.lengths[i]) for i in samples]
        assert self.cost is not None
        return [float(self.cost[i]) for i in samples]

    def _filled(self, steps: list[Step]) -> list[Step]:
        """Fill an incomplete last step with the epoch's first rows, or drop it, so that each rank has a row."""
        if self.drop_last:
            return [step for step in steps if all(step)]
        rows = [row for step in steps for row in step if row]
        spare = cycle(rows)
        return [tuple(row or next(spare) for row in step) for step in steps]


def _divisible(step: Step) -> bool:
    """Return whether each row of the step can be cut in two."""
    return min(map(len, step)) > 1
