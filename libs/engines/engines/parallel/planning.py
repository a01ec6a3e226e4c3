"""The plan of which ranks compute which rows of a step: a pure function of the lengths, the same on every rank.

A planner splits the rows of a batch over the ranks of a plan plane (`ParallelLayout.plan_ranks`) and into
micro-batches. `DataParallelPlanner` keeps each sequence on one rank; `engines.inputs.context_parallel` has the planner
whose groups of ranks share sequences.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch.distributed as dist

from dyncp.planning.types import DynamicPlan
from seqpack.planning.micro_batches import plan_micro_batches
from seqpack.renamed import renamed


class PlannedRows(NamedTuple):
    """One micro-batch of a rank: `rows` of the batch (none: a dummy), which `ranks` (plan indices) compute together."""

    rows: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """`ranks[i]` are the micro-batches of plan index i, as many on every rank.

    `lengths` are those of the whole batch; `hash` (52 bits) is the same on every rank, or the ranks disagree; `fill`
    is true tokens over the capacity of all micro-batches of all ranks. `groups`: dyncp's plan, where there is one.
    """

    ranks: tuple[tuple[PlannedRows, ...], ...]
    lengths: tuple[int, ...]
    hash: int
    fill: float
    groups: DynamicPlan | None = None

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of each rank."""
        return len(self.ranks[0])

    def rows_of(self, index: int) -> tuple[int, ...]:
        """Return the rows that the rank with this plan index must hold: its own, or the shortest where it has none."""
        own = sorted({row for part in self.ranks[index] for row in part.rows})
        return tuple(own) or (self.lengths.index(min(self.lengths)),)

    def with_rows(self, rows: Sequence[int], lengths: tuple[int, ...]) -> "StepPlan":
        """Return the plan for a batch with these lengths, whose row rows[i] is row i of this plan."""
        ranks = tuple(
            tuple(part._replace(rows=tuple(rows[row] for row in part.rows)) for part in parts) for parts in self.ranks
        )
        return replace(self, ranks=ranks, lengths=lengths)

    renumbered = renamed("with_rows")

    def without(self, rows: Collection[int]) -> "StepPlan":
        """Drop these rows where they are, then micro-batches that are empty on every rank; at least one stays."""
        if not rows:
            return self
        remaining = [[tuple(row for row in part.rows if row not in rows) for part in parts] for parts in self.ranks]
        used = [m for m in range(self.num_micro_batches) if any(parts[m] for parts in remaining)] or [0]
        ranks = tuple(
            tuple(PlannedRows(own[m], self.ranks[i][m].ranks if own[m] else (i,)) for m in used)
            for i, own in enumerate(remaining)
        )
        return replace(self, ranks=ranks)


class Planner(Protocol):
    """See the module's text."""

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """Plan a step from the lengths of all rows of the batch: pure and deterministic.

        ValueError for a row that cannot fit.
        """
        ...

    def prepare(self, plan: StepPlan) -> None:
        """Make the process groups of the plan. Collective, after the ranks agreed on the plan."""
        ...

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the process group of ranks that share a micro-batch; None for one rank alone."""
        ...


@dataclass(frozen=True)
class DataParallelPlanner:
    """A planner of whole sequences: balanced micro-batches under the cap, as many on every rank."""

    max_tokens: int
    plan_size: int = 1

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """See `Planner`."""
        made = plan_micro_batches(lengths, self.max_tokens, self.plan_size)
        ranks = tuple(
            tuple(PlannedRows(tuple(rows), (index,)) for rows in parts) for index, parts in enumerate(made.ranks)
        )
        capacity = self.max_tokens * made.num_micro_batches * self.plan_size
        return StepPlan(ranks, tuple(lengths), int(made.hash), sum(lengths) / max(capacity, 1))

    def prepare(self, plan: StepPlan) -> None:
        """Do nothing: there are no groups to make."""

    def group(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return None: every rank computes alone."""
        del ranks
        return None
