"""A batch sampler for a map dataset: each batch is the samples of one packed row, the same number on every rank."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import cycle, pairwise
from typing import Any

import numpy as np

from seqpack.planning.checks import check_costs, check_lengths, check_positive_int
from seqpack.planning.micro_batches import Cost, plan_micro_batches
from seqpack.planning.padding import check_aligned, frozen_bucket, usable_capacity
from seqpack.planning.plan_json import plan_hash

Row = tuple[int, ...]


class PackedBatchSampler:
    """A batch sampler of lists of indices, each at most `max_tokens` long when packed: `DataLoader(batch_sampler=...)`.

    Strategy
    1. The order of an epoch is a permutation by (`seed`, `epoch`), or the dataset's own without `shuffle`.
    2. It is cut into windows of `window` samples; each is planned by `plan_micro_batches` over all ranks, so that rows
       are few, under the cap after padding (`align`, `bucket`), and balanced by `cost`.
    3. The rows that run at the same time on the ranks (a step) stay together; the order of a window's steps is drawn.
    4. Where samples are fewer than places in a step, the places are filled with rows of the epoch again, or with
       `drop_last` the step is left out: every rank yields the same number of rows. `repeated` and `dropped` say it.

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
    ) -> None:
        self.lengths = check_lengths(lengths)
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
        check_aligned(self.lengths, align, usable_capacity(self.max_tokens, align, bucket))
        if len(self.lengths) < self.world_size:
            raise ValueError(f"{len(self.lengths)} samples are too few for {self.world_size} ranks")
        if self.window < self.world_size:
            raise ValueError(f"window={self.window} is under the {self.world_size} ranks: no step could be filled")
        self.epoch = 0
        self._start = 0
        self._yielded = 0
        self._planned: tuple[int, list[tuple[Row, ...]]] | None = None

    @cached_property
    def fingerprint(self) -> int:
        """The 52-bit hash of all that an epoch's plan depends on except the rank; states and ranks compare it."""
        costs = None if self.cost is None else [float(c) for c in self._costs(range(len(self.lengths)))]
        parts = (self.lengths, self.max_tokens, self.world_size, self.shuffle, self.seed, self.drop_last, self.window)
        return plan_hash(repr((*parts, costs, self.align, self.bucket)))

    @property
    def steps(self) -> list[tuple[Row, ...]]:
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
        """Return the number of rows of this rank in this epoch."""
        return len(self.steps)

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

    def _plan(self, epoch: int) -> list[tuple[Row, ...]]:
        """Return the steps of an epoch, each with a row for every rank."""
        rng = np.random.default_rng([self.seed, epoch])
        count = len(self.lengths)
        order = rng.permutation(count).tolist() if self.shuffle else list(range(count))
        edges = [*range(0, count, self.window), count]
        if len(edges) > 2 and edges[-1] - edges[-2] < self.world_size:
            del edges[-2]  # too few for a step of their own: they join the window before
        steps: list[tuple[Row, ...]] = []
        for start, stop in pairwise(edges):
            steps += self._window(order[start:stop], rng)
        return self._filled(steps)

    def _window(self, samples: list[int], rng: np.random.Generator) -> list[tuple[Row, ...]]:
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

    def _filled(self, steps: list[tuple[Row, ...]]) -> list[tuple[Row, ...]]:
        """Fill an incomplete last step with the epoch's first rows, or drop it, so that each rank has a row."""
        if self.drop_last:
            return [step for step in steps if all(step)]
        rows = [row for step in steps for row in step if row]
        spare = cycle(rows)
        return [tuple(row or next(spare) for row in step) for step in steps]
