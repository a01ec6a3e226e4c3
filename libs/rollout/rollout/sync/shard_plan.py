"""Who sends which box of which tensor to whom: a pure function of what ranks hold and of what workers want.

1. `plan_transfers` cuts what each worker wants into boxes that one rank holds. Of several ranks that hold the same, the
   one that has least to send does (Graham's list scheduling: nobody sends more than a piece above what is even, where
   all could send all). No tensor is put together anywhere but where it is wanted.
2. `rounds_of` joins transfers into buckets and orders them: in a round a process sends at most one bucket and takes at
   most one. All processes obey the same order, so that none waits for one that waits for it, and each has memory for
   one bucket that goes and one that comes.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rollout.sync.boxes import Box
from rollout.sync.manifest import TensorSpec

ALIGN = 16
"""Bytes of which a box's first one in a bucket is a multiple."""


class Shard(NamedTuple):
    """A box of a tensor that a process holds, or wants."""

    process: int
    tensor: str
    box: Box


class Transfer(NamedTuple):
    """A box that goes from process `source` to process `target`; the same process where it has what it wants."""

    source: int
    target: int
    tensor: str
    box: Box


@dataclass(frozen=True)
class PlannedBucket:
    """Boxes that go from one process to another at once, laid end to end, each start aligned."""

    source: int
    target: int
    parts: tuple[tuple[str, Box, int], ...]
    """Tensor, box, and first byte of each."""
    nbytes: int


Round = tuple[PlannedBucket, ...]


@dataclass(frozen=True)
class SyncPlan:
    """The transfers of a weight sync, in rounds; the same on every process."""

    specs: Mapping[str, TensorSpec]
    rounds: tuple[Round, ...]
    max_bytes: int

    def bytes_of(self, process: int) -> tuple[int, int]:
        """Return the bytes that a process sends to others, and those that it takes from others."""
        buckets = [bucket for every in self.rounds for bucket in every if bucket.source != bucket.target]
        sent = sum(bucket.nbytes for bucket in buckets if bucket.source == process)
        return sent, sum(bucket.nbytes for bucket in buckets if bucket.target == process)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of different processes that pass something, each from its sender to its receiver."""
        every = {(one.source, one.target) for parts in self.rounds for one in parts if one.source != one.target}
        return sorted(every)


def plan_sync(specs: Iterable[TensorSpec], held: Iterable[Shard], wanted: Iterable[Shard], max_bytes: int) -> SyncPlan:
    """Return the plan of a weight sync whose buckets have at most `max_bytes`; see `plan_transfers`."""
    named = {spec.name: spec for spec in specs}
    transfers = plan_transfers(named, held, wanted, max_bytes)
    return SyncPlan(named, rounds_of(transfers, {name: one.dtype for name, one in named.items()}, max_bytes), max_bytes)


def plan_transfers(
    specs: Mapping[str, TensorSpec], held: Iterable[Shard], wanted: Iterable[Shard], max_bytes: int
) -> list[Transfer]:
    """Return transfers of at most `max_bytes` that give each process every element that it wants once.

    `held`: boxes of ranks, in any cuts; ranks that hold the same element have the same value of it.

    Raises:
        ValueError: a box lies outside its tensor, or nobody holds an element.
    """
    if max_bytes < ALIGN:
        raise ValueError(f"max_bytes must be at least {ALIGN}, got {max_bytes}")
    owners: defaultdict[str, list[Shard]] = defaultdict(list)
    for shard in held:
        owners[_checked(shard, specs).tensor].append(shard)
    load: defaultdict[int, int] = defaultdict(int)
    transfers: list[Transfer] = []
    for want in wanted:
        size = specs[_checked(want, specs).tensor].dtype.itemsize
        for box in want.box.cut(max(1, max_bytes // size)):
            transfers += _sources(want._replace(box=box), owners[want.tensor], load, size)
    return transfers


def _sources(want: Shard, owners: Sequence[Shard], load: defaultdict[int, int], size: int) -> list[Transfer]:
    """Return the transfers of one box, and add their bytes to the load of who sends them."""
    left, transfers = [want.box], []
    while left:
        box = left.pop()
        fits = [(shard, part) for shard in owners if (part := box.overlap(shard.box)) is not None]
        if not fits:
            raise ValueError(f"no rank holds {want.tensor}{list(box.start)}, {list(box.size)} elements from there on")
        # What is here goes nowhere. Else the least loaded rank, of these the one with the larger part, then a turn.
        shard, part = min(
            fits,
            key=lambda one: (
                one[0].process != want.process,
                load[one[0].process],
                -one[1].numel,
                (one[0].process - want.process) % 4096,
            ),
        )
        transfers.append(Transfer(shard.process, want.process, want.tensor, part))
        if shard.process != want.process:
            load[shard.process] += part.numel * size
        left += box.without(part)
    return transfers


def _checked(shard: Shard, specs: Mapping[str, TensorSpec]) -> Shard:
    spec = specs.get(shard.tensor)
    if spec is None:
        raise ValueError(f"process {shard.process} names {shard.tensor!r}, which is none of the tensors")
    if not shard.box.fits(spec.shape):
        raise ValueError(f"process {shard.process}: {shard.box} lies outside {shard.tensor} {spec.shape}")
    return shard


def rounds_of(transfers: Iterable[Transfer], dtypes: Mapping[str, "torch.dtype"], max_bytes: int) -> tuple[Round, ...]:
    """Join transfers into buckets of at most `max_bytes` and order them in rounds.

    The pair whose processes have most left goes first, so that the busiest one is idle in few rounds, if any.
    """
    waiting = _buckets(transfers, dtypes, max_bytes)
    left: defaultdict[tuple[str, int], int] = defaultdict(int)
    for (source, target), buckets in waiting.items():
        left["out", source] += len(buckets)
        left["in", target] += len(buckets)
    rounds: list[Round] = []
    while waiting:
        pairs = sorted(waiting, key=lambda p: (-max(left["out", p[0]], left["in", p[1]]), p))
        sending: set[int] = set()
        taking: set[int] = set()
        chosen: list[PlannedBucket] = []
        for source, target in pairs:
            if source in sending or target in taking:
                continue
            sending.add(source)
            taking.add(target)
            chosen.append(waiting[source, target].pop())
            left["out", source] -= 1
            left["in", target] -= 1
            if not waiting[source, target]:
                del waiting[source, target]
        rounds.append(tuple(sorted(chosen, key=lambda one: (one.source, one.target))))
    return tuple(rounds)


def _buckets(
    transfers: Iterable[Transfer], dtypes: Mapping[str, "torch.dtype"], max_bytes: int
) -> dict[tuple[int, int], list[PlannedBucket]]:
    """Return the buckets of each pair, the last one to go first."""
    parts: defaultdict[tuple[int, int], list[list[tuple[str, Box, int]]]] = defaultdict(list)
    ends: dict[tuple[int, int], list[int]] = defaultdict(list)
    for one in transfers:
        pair = (one.source, one.target)
        nbytes = one.box.numel * dtypes[one.tensor].itemsize
        start = -(-ends[pair][-1] // ALIGN) * ALIGN if ends[pair] else 0
        if not parts[pair] or start + nbytes > max_bytes:
            parts[pair].append([])
            ends[pair].append(0)
            start = 0
        parts[pair][-1].append((one.tensor, one.box, start))
        ends[pair][-1] = start + nbytes
    return {
        pair: [PlannedBucket(*pair, tuple(one), end) for one, end in zip(lists, ends[pair], strict=True)][::-1]
        for pair, lists in parts.items()
    }
