"""A weight sync shard to shard: each process sends the boxes that a plan says, and yields those that it takes.

1. `describe` and `plan_of` make the plan: every process tells what it holds and what it wants, as JSON, and all compute
   the same plan of it (`rollout.sync.shard_plan`), which is kept while nothing changes.
2. `ShardExchange.buckets` obeys it round by round, of which two are under way at a time. A process has memory for two
   buckets that go and two that come: four times the plan's `max_bytes`, whatever the model's size.
3. Each bucket ends with its place in the plan, the digest of its bytes, and the HMAC of both by the key of the meeting
   (`rollout.workers.authentication`): what is damaged, out of turn or from a stranger is refused.

The bytes pass through a `torch.distributed` group: gloo's through host memory, NCCL's and HCCL's between devices.
"""

import hmac
import json
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from rollout.sync.boxes import Box, Rectangle
from rollout.sync.manifest import TensorSpec
from rollout.sync.pieces import Bucket, Header
from rollout.sync.shard_plan import PlannedBucket, Round, Shard, SyncPlan, plan_sync
from rollout.sync.tensor_digest import digest_of
from rollout.workers.authentication import MAC_BYTES, Exchange, mac
from rollout.workers.bucket_messages import DTYPES
from seqpack.memory import ledger

_PLACE = struct.Struct(">IIIQI")
TRAILER_BYTES = _PLACE.size + MAC_BYTES
SECONDS = 600.0
"""Seconds until a bucket that does not come counts as lost."""


class HeldShard(Protocol):
    """A box of a tensor that this process has (`engines.weights.shard_export.WeightShard`)."""

    @property
    def name(self) -> str:
        """Name of the tensor."""
        ...

    @property
    def shape(self) -> Sequence[int]:
        """Shape of the whole tensor."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type in which it is sent."""
        ...

    @property
    def box(self) -> Rectangle:
        """Its place in the tensor."""
        ...

    def read(self, part: Any) -> Tensor:
        """Return the values of a box that lies in its own, in any type."""
        ...


class ShardGroup:
    """This process's end of a group of `torch.distributed`, its default one or another."""

    def __init__(self, group: Any, device: torch.device, seconds: float = SECONDS) -> None:
        self._group, self.device = group, device
        self._limit = timedelta(seconds=seconds)
        self.rank, self.size = int(group.rank()), int(group.size())

    def send(self, data: Tensor, target: int) -> Callable[[], None]:
        """Begin to send bytes; return what waits until they are on their way."""
        return self._waiter(self._group.send([data], target, 0))

    def take(self, data: Tensor, source: int) -> Callable[[], None]:
        """Begin to receive bytes into `data`; return what waits until they are there."""
        return self._waiter(self._group.recv([data], source, 0))

    def gather(self, mine: bytes) -> list[bytes]:
        """Return the bytes of all processes, by rank; collective."""
        sizes = self._gathered(torch.tensor([len(mine)]), 1)
        most = max(1, *(int(one) for one in sizes))
        padded = torch.zeros(most, dtype=torch.uint8)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else 0
        every = self._gathered(padded, most)
        return [bytes(one[: int(size)].numpy()) for one, size in zip(every, sizes, strict=True)]

    @property
    def exchange(self) -> Exchange:
        """The exchange by which its processes authenticate."""

        def exchange(step: str, mine: bytes) -> list[bytes]:
            del step  # all are at the same one
            return self.gather(mine)

        return exchange

    def _gathered(self, mine: Tensor, length: int) -> list[Tensor]:
        near = mine.to(self.device)
        every = [torch.empty(length, dtype=mine.dtype, device=self.device) for _ in range(self.size)]
        self._waiter(self._group.allgather([every], [near]))()
        return [one.cpu() for one in every]

    def _waiter(self, work: Any) -> Callable[[], None]:
        def wait() -> None:
            work.wait(self._limit)
            if self.device.type != "cpu":  # there it made a stream wait, and no more
                torch.accelerator.current_stream(self.device).synchronize()

        return wait


def describe(held: Iterable[HeldShard], wants: bool, **more: Any) -> bytes:
    """Return what a process tells of itself. `wants`: whether it takes all tensors whole, for a sampler of its own;
    `more`: JSON values."""
    specs: dict[str, Any] = {}
    boxes = []
    for one in held:
        specs[one.name] = [list(one.shape), str(one.dtype)]
        boxes.append([one.name, list(one.box.start), list(one.box.size)])
    return json.dumps({"specs": specs, "held": boxes, "wants": wants, **more}).encode()


@dataclass(frozen=True, eq=False)
class ShardMetadata:
    """What all processes of a group tell: the tensors, who holds what, and all by process (`describe`)."""

    specs: Mapping[str, TensorSpec]
    held: tuple[Shard, ...]
    every: tuple[Mapping[str, Any], ...]


def plan_of(group: ShardGroup, own: bytes, max_bytes: int) -> SyncPlan:
    """Return the plan of what all processes of a group tell (`describe`); collective.

    Raises:
        ValueError: they contradict each other, or nobody holds some element.
    """
    return plan_of_metadata(read_metadata(tuple(group.gather(own))), max_bytes)


@lru_cache(maxsize=2)
def read_metadata(every: tuple[bytes, ...]) -> ShardMetadata:
    """Read what all processes tell. Raise ValueError where they contradict each other."""
    told = tuple(json.loads(one) for one in every)
    specs: dict[str, TensorSpec] = {}
    held: list[Shard] = []
    for process, one in enumerate(told):
        for name, (shape, dtype) in one["specs"].items():
            spec = TensorSpec(name, tuple(shape), DTYPES[dtype])
            if specs.setdefault(name, spec) != spec:
                raise ValueError(f"process {process} has {spec}, another one {specs[name]}")
        held += [Shard(process, name, Box(tuple(start), tuple(size))) for name, start, size in one["held"]]
    return ShardMetadata(specs, tuple(held), told)


@lru_cache(maxsize=2)
def plan_of_metadata(metadata: ShardMetadata, max_bytes: int) -> SyncPlan:
    """Return the plan in which each process that wants the weights takes them whole; it is kept for the next time."""
    wanted = [
        Shard(process, spec.name, Box.whole(spec.shape))
        for process, one in enumerate(metadata.every)
        if one["wants"]
        for spec in metadata.specs.values()
    ]
    return plan_sync(metadata.specs.values(), metadata.held, wanted, max_bytes)


def reader_of(held: Iterable[HeldShard]) -> Callable[[str, Box], Tensor]:
    """Return what reads a box of a tensor that lies in one of these shards."""
    by_name: defaultdict[str, list[HeldShard]] = defaultdict(list)
    for one in held:
        by_name[one.name].append(one)

    def read(name: str, box: Box) -> Tensor:
        return next(one for one in by_name[name] if Box.of(one.box).overlap(box) == box).read(box)

    return read


@dataclass
class _Round:
    """A process's part of a round that has begun."""

    number: int
    waits: list[Callable[[], None]] = field(default_factory=list)
    taken: tuple[PlannedBucket, Tensor] | None = None


class ShardExchange:
    """One process's part of a plan.

    Args:
        plan: the same on every process.
        group: through which the bytes pass.
        held: what this process has.
        key: the meeting's, of `authenticate`.
    """

    def __init__(self, plan: SyncPlan, group: ShardGroup, held: Iterable[HeldShard], key: bytes) -> None:
        self._plan, self._group, self._key = plan, group, key
        self._held = reader_of(held)

    def buckets(self) -> Iterator[Bucket]:
        """Yield the buckets for this process, each good only until the next, and send its own; collective.

        All rounds are obeyed before an error about a bucket is raised: others wait for this process.

        Raises:
            ValueError: a bucket was not the one that the plan says, or came damaged.
            RuntimeError: a process did not come in time.
        """
        problem: ValueError | None = None
        buffers = [[self._buffer(at) for at in (0, 1)] for _ in range(2)]
        begun: _Round | None = None
        for number, every in enumerate((*self._plan.rounds, ())):
            following = self._begin(every, number, buffers[number % 2])  # it passes while the last one is looked at
            bucket = None
            try:
                bucket = None if begun is None else self._ended(begun)
            except ValueError as error:
                problem = problem or error
            if bucket is not None:
                yield bucket
            begun = following
        if problem is not None:
            raise problem

    def _begin(self, every: Round, number: int, buffers: Sequence[Tensor]) -> "_Round":
        """Begin this process's part of a round.

        gloo tells a sender on the same connection that its receiver is ready, behind what goes that way: so receivers
        are ready first, or two processes that exchange buckets would take turns. Between devices the order is the same
        on both sides, as connections are made two by two.
        """
        begun = _Round(number)
        mine = [one for one in every if self._group.rank in (one.source, one.target)]
        if self._group.device.type == "cpu":
            mine.sort(key=lambda one: one.source == self._group.rank)
        for planned in mine:
            end = planned.nbytes + TRAILER_BYTES
            if planned.source != self._group.rank:
                begun.taken = (planned, buffers[1][:end])
                begun.waits.append(self._group.take(buffers[1][:end], planned.source))
                continue
            data = self._pack(planned, number, buffers[0][:end])
            if planned.target == planned.source:
                begun.taken = (planned, data)
            else:
                begun.waits.append(self._group.send(data, planned.target))
        return begun

    def _ended(self, begun: "_Round") -> Bucket | None:
        """Wait for this process's part of a round; return what it took. Raise ValueError where that is odd."""
        for wait in begun.waits:
            wait()
        return None if begun.taken is None else self._checked(*begun.taken, begun.number)

    def _buffer(self, at: int) -> Tensor:
        """Return memory for the largest bucket of which this process is source (0) or target (1)."""
        mine = [b.nbytes for every in self._plan.rounds for b in every if (b.source, b.target)[at] == self._group.rank]
        size = max(mine) + TRAILER_BYTES if mine else 0
        buffer = torch.empty(size, dtype=torch.uint8, device=self._group.device)
        ledger.record(ledger.BUCKETS, buffer)
        return buffer

    def _pack(self, planned: PlannedBucket, number: int, data: Tensor) -> Tensor:
        """Fill `data` with the bytes of a bucket and its trailer; return it."""
        data.zero_()  # what lies between boxes is sent too
        for name, box, start in planned.parts:
            dtype = self._plan.specs[name].dtype
            place = data[start : start + box.numel * dtype.itemsize].view(dtype).view(box.size)
            place.copy_(self._held(name, box))
        place_bytes = _PLACE.pack(number, planned.source, planned.target, planned.nbytes, self._digest(data))
        trailer = place_bytes + mac(self._key, place_bytes)
        data[planned.nbytes :] = torch.frombuffer(bytearray(trailer), dtype=torch.uint8).to(data.device)
        return data

    def _checked(self, planned: PlannedBucket, data: Tensor, number: int) -> Bucket:
        trailer = bytes(data[planned.nbytes :].cpu().numpy())
        place, proof = trailer[: _PLACE.size], trailer[_PLACE.size :]
        where = f"the bucket of process {planned.source} in round {number}"
        if not hmac.compare_digest(proof, mac(self._key, place)):
            raise ValueError(f"{where} is not from a process that knows the run's secret")
        wanted = (number, planned.source, planned.target, planned.nbytes)
        *found, digest = _PLACE.unpack(place)
        if tuple(found) != wanted:
            raise ValueError(f"{where} is another one's: {tuple(found)}, not {wanted}")
        if digest != self._digest(data):
            raise ValueError(f"{where} came damaged: its digest differs")
        return Bucket(tuple(self._headers(planned)), data[: planned.nbytes])

    def _digest(self, data: Tensor) -> int:
        return digest_of(data[: data.numel() - TRAILER_BYTES])

    def _headers(self, planned: PlannedBucket) -> Iterator[Header]:
        for name, box, start in planned.parts:
            spec = self._plan.specs[name]
            yield Header(name, spec.shape, spec.dtype, 0, box.numel, start, box)
