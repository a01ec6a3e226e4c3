"""Micro-batches: a hard token cap, the same number on every data-parallel rank, balanced by cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from seqpack.planning.balancing_capped import balance_capped
from seqpack.planning.checks import Array, check_costs, check_lengths, check_positive_int
from seqpack.planning.packing import pack
from seqpack.planning.padding import (
    Bucket,
    aligned_length,
    check_aligned,
    frozen_bucket,
    packed_geometry,
    usable_capacity,
)
from seqpack.planning.plan_json import from_json, plan_hash, to_json

Cost = Callable[[int], float] | Sequence[float]


@dataclass(frozen=True)
class MicroBatchPlan:
    """`ranks[dp_rank][micro_batch]` holds indices; every rank has the same number of micro-batches, some may be empty.

    `lengths` are the true lengths, each of which takes its next multiple of `align`; a micro-batch is padded to a
    `bucket`. `costs` are what was balanced; `split_groups` names the groups that were too long for one micro-batch.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    lengths: tuple[int, ...]
    costs: tuple[float, ...]
    max_tokens: int
    align: int = 1
    split_groups: tuple[int, ...] = ()
    bucket: Bucket = None

    @cached_property
    def hash(self) -> int:
        """The 52-bit hash that ranks compare before they start."""
        return plan_hash(self.to_json())

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0])

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        """Tokens by rank and micro-batch, padding included."""
        return tuple(tuple(map(self._tokens, rank)) for rank in self.ranks)

    def _tokens(self, micro_batch: tuple[int, ...]) -> int:
        return packed_geometry([self.lengths[i] for i in micro_batch], self.align, self.bucket).total

    @property
    def loads(self) -> tuple[tuple[float, ...], ...]:
        """Cost by rank and micro-batch."""
        return tuple(tuple(sum(self.costs[i] for i in mb) for mb in rank) for rank in self.ranks)

    @property
    def max_over_mean(self) -> float:
        """Cost of the step, when ranks wait for one another after each micro-batch, over the perfectly shared cost."""
        loads = self.loads
        total = sum(map(sum, loads))
        return sum(map(max, zip(*loads, strict=True))) * len(loads) / total if total > 0 else 1.0

    def to_json(self) -> str:
        """Return the plan as JSON."""
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "MicroBatchPlan":
        """Read what `to_json` wrote; ValueError for anything else."""
        return from_json(cls, text)


def plan_micro_batches(
    lengths: Sequence[int] | Array,
    max_tokens: int,
    dp_size: int = 1,
    cost: Cost | None = None,
    *,
    groups: Sequence[int] | Array | None = None,
    long_groups: Literal["split", "refuse"] = "split",
    align: int = 1,
    bucket: int | Sequence[int] | None = None,
    count_multiple: int = 1,
) -> MicroBatchPlan:
    """Plan one step: few micro-batches of at most `max_tokens`, each sample in one of them, ranks equally loaded.

    `cost` is a function of the length, or one cost a sample (tokens when None). Samples with the same number in
    `groups` share a micro-batch; a group longer than the cap is split (and reported) or refused. The cap holds after
    padding: lengths are rounded up to multiples of `align` (see `alignment`), micro-batches to `bucket` (a multiple, or
    the sizes to choose from), as `pack_sequences` does. The number of micro-batches of a rank is a multiple of
    `count_multiple`. Deterministic. ValueError names the sample over the cap.
    """
    cap, ranks = check_positive_int(max_tokens, "max_tokens"), check_positive_int(dp_size, "dp_size")
    multiple, usable = check_positive_int(count_multiple, "count_multiple"), usable_capacity(cap, align, bucket)
    sizes = check_lengths(lengths, cap)
    aligned = check_aligned(sizes, align, usable)
    costs = _costs(cost, sizes)
    items, split_groups = _items(aligned, usable, groups, long_groups)
    item_sizes = [sum(aligned[i] for i in item) for item in items]
    item_costs = [sum(costs[i] for i in item) for item in items]
    packed = pack(item_sizes, usable).bins
    slots = aligned_length(max(1, -(-len(packed) // ranks)), multiple) * ranks
    parts = balance_capped(item_sizes, item_costs, slots, usable, packed, together=ranks)
    batches = [tuple(sorted(i for item in part for i in items[item])) for part in parts]
    dealt = _deal(batches, costs, ranks)
    return MicroBatchPlan(dealt, tuple(sizes), tuple(costs), cap, align, split_groups, frozen_bucket(bucket))


def _costs(cost: Cost | None, sizes: list[int]) -> list[float]:
    if cost is None:
        return [float(size) for size in sizes]
    values = [cost(size) for size in sizes] if callable(cost) else cost
    costs: list[float] = check_costs(values, "cost").tolist()
    if len(costs) != len(sizes):
        raise ValueError(f"{len(costs)} costs for {len(sizes)} lengths")
    return costs


def _items(
    aligned: list[int], cap: int, groups: Sequence[int] | Array | None, long_groups: str
) -> tuple[list[tuple[int, ...]], tuple[int, ...]]:
    """Return tuples of indices that must stay together, and the groups that had to be split."""
    if long_groups not in ("split", "refuse"):
        raise ValueError(f"long_groups must be 'split' or 'refuse', got {long_groups!r}")
    if groups is None:
        return [(i,) for i in range(len(aligned))], ()
    names = check_lengths(groups, name="groups", minimum=None)
    if len(names) != len(aligned):
        raise ValueError(f"{len(names)} groups for {len(aligned)} lengths")
    members: dict[int, list[int]] = {}
    for index, name in enumerate(names):
        members.setdefault(name, []).append(index)
    items: list[tuple[int, ...]] = []
    split_groups = []
    for name, indices in members.items():
        tokens = sum(aligned[i] for i in indices)
        if tokens <= cap:
            items.append(tuple(indices))
            continue
        if long_groups == "refuse":
            raise ValueError(
                f"group {name} has {tokens} tokens, over max_tokens={cap}; allow long_groups='split' or raise the cap"
            )
        split_groups.append(name)
        items.extend(tuple(indices[i] for i in piece) for piece in pack([aligned[i] for i in indices], cap).bins)
    return items, tuple(split_groups)


def _deal(batches: list[tuple[int, ...]], costs: list[float], ranks: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Assign each rank one micro-batch of every cost level: equal ones run at the same time, and totals even out."""
    loads = {batch: sum(costs[i] for i in batch) for batch in batches}
    order = sorted(batches, key=lambda batch: (-loads[batch], batch))
    dealt: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for start in range(0, len(order), ranks):
        level = order[start : start + ranks]
        for rank, batch in zip(sorted(range(ranks), key=lambda r: (totals[r], r)), level, strict=True):
            dealt[rank].append(batch)
            totals[rank] += loads[batch]
    return tuple(tuple(rank) for rank in dealt)
