"""Weights for vLLM's workers that lie in parts on the devices of several ranks, of which each worker reads its own.

1. `plan_parts` says, of what ranks hold and what each worker computes with (`rollout.sync.parallel_boxes`), which boxes
   each rank lays out in its region, once each however many workers read it, and which of these a worker reads.
2. A `PartRegions` is a rank's end: two regions of its own shards on its device, one in use, the other for new weights.
   It is no copy of the model: all ranks' regions together are.
3. `assembled` is a worker's end: it opens the regions, copies its own boxes into one tensor after another, and checks
   the digest of each. What is not its own in a tensor is zero: vLLM's loaders cut that off.

Between processes a place travels as JSON: `{"regions": [path, ...], "tensors": [[name, dtype, shape], ...],
"slots": [[region, tensor, start, size, first byte, digest], ...], "reads": [[slot, ...] of each worker]}`.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout.errors import NotFiniteError
from rollout.sync.assembler import is_good
from rollout.sync.boxes import Box
from rollout.sync.manifest import TensorSpec
from rollout.sync.parallel_boxes import WorkerLayout, worker_boxes
from rollout.sync.pieces import Bucket
from rollout.sync.shard_plan import Shard, plan_transfers
from rollout.sync.tensor_digest import digest_of

ALIGN = 64
MOST_BYTES = 1 << 26
"""Bytes of a box at most, which is what a worker copies at once."""
Place = dict[str, Any]
ReadBytes = Callable[[int, int], Tensor]
"""Function that returns a copy of a region's bytes, by the first one and their number, as `u8` on the own device."""


class PartSlot(NamedTuple):
    """A box of a tensor in a rank's region; `start` counts bytes."""

    tensor: str
    box: Box
    start: int


@dataclass(frozen=True, eq=False)
class PartsPlan:
    """The regions of all ranks, and what each sampler's workers read of them."""

    specs: Mapping[str, TensorSpec]
    regions: Mapping[int, tuple[PartSlot, ...]]
    """Slots of each rank that has some."""
    reads: Mapping[int, tuple[tuple[tuple[int, int], ...], ...]]
    """Of each rank with a sampler, and each worker of it: (rank, number of the slot) of what it reads."""

    def nbytes(self, rank: int) -> int:
        """Return the bytes of a rank's region."""
        slots = self.regions.get(rank, ())
        return max((one.start + one.box.numel * self.specs[one.tensor].dtype.itemsize for one in slots), default=0)

    def place(self, sampler: int, staged: Mapping[int, tuple[str, Sequence[int]]]) -> Place:
        """Return the place that a sampler's workers read; `staged`: each rank's path, and the digests of its slots."""
        ranks = sorted(self.regions)
        tensors = {name: number for number, name in enumerate(self.specs)}
        numbers: dict[tuple[int, int], int] = {}
        slots: list[list[Any]] = []
        for at, rank in enumerate(ranks):
            for number, (one, digest) in enumerate(zip(self.regions[rank], staged[rank][1], strict=True)):
                numbers[rank, number] = len(slots)
                slots.append([at, tensors[one.tensor], list(one.box.start), list(one.box.size), one.start, digest])
        return {
            "regions": [staged[rank][0] for rank in ranks],
            "tensors": [[s.name, str(s.dtype).removeprefix("torch."), list(s.shape)] for s in self.specs.values()],
            "slots": slots,
            "reads": [[numbers[one] for one in worker] for worker in self.reads[sampler]],
        }


def plan_parts(
    specs: Iterable[TensorSpec],
    held: Iterable[Shard],
    samplers: Mapping[int, WorkerLayout],
    most: int = MOST_BYTES,
) -> PartsPlan:
    """Return the regions of ranks that hold these shards, for samplers beside these ranks.

    Raises:
        ValueError: workers cannot split a tensor, or nobody holds an element that one wants.
    """
    named, shards = {spec.name: spec for spec in specs}, list(held)
    slots: defaultdict[int, list[PartSlot]] = defaultdict(list)
    ends: defaultdict[int, int] = defaultdict(int)
    known: dict[tuple[int, str, Box], int] = {}
    reads: dict[int, tuple[tuple[tuple[int, int], ...], ...]] = {}
    for sampler, layout in samplers.items():
        workers: list[tuple[tuple[int, int], ...]] = []
        for worker in range(layout.workers):
            wanted = [
                Shard(-1, spec.name, box)
                for spec in named.values()
                for box in worker_boxes(spec.name, spec.shape, layout, worker)
            ]
            mine: list[tuple[int, int]] = []
            for one in plan_transfers(named, shards, wanted, most):
                key = (one.source, one.tensor, one.box)
                if key not in known:
                    start = -(-ends[one.source] // ALIGN) * ALIGN
                    known[key] = len(slots[one.source])
                    slots[one.source].append(PartSlot(one.tensor, one.box, start))
                    ends[one.source] = start + one.box.numel * named[one.tensor].dtype.itemsize
                mine.append((one.source, known[key]))
            workers.append(tuple(mine))
        reads[sampler] = tuple(workers)
    return PartsPlan(named, {rank: tuple(own) for rank, own in slots.items()}, reads)


def layout_of(config: Mapping[str, Any], settings: Any) -> WorkerLayout | None:
    """Return how workers split a model of this text config by an engine's settings (`VllmConfig`); None where that is
    not known, or copies share experts, or workers are on several machines."""
    apart = settings.experts_over_copies or settings.nodes > 1 or settings.pipeline_parallel > 1
    if not config.get("num_key_value_heads") or apart or settings.device == "cpu":
        return None
    try:
        return WorkerLayout.of(SimpleNamespace(**config), settings.tensor_parallel, settings.expert_parallel)
    except ValueError:  # vLLM splits it in a way of its own
        return None


class PartRegions:
    """A rank's two regions: one has the weights in use, `stage` writes into the other.

    Args:
        plan: of which it takes its own slots.
        rank: this one.
        allocate: returns `u8[n]` that a worker can open.
        path_of: the path by which it does.
    """

    def __init__(
        self, plan: PartsPlan, rank: int, allocate: Callable[[int], Tensor], path_of: Callable[[Tensor], str]
    ) -> None:
        self.plan, self._slots = plan, plan.regions.get(rank, ())
        nbytes = plan.nbytes(rank)
        self._regions = [allocate(nbytes) for _ in range(2)] if nbytes else []
        self._paths = [path_of(region) for region in self._regions]
        self._versions = [-1, -1]

    def stage(self, read: Callable[[str, Box], Tensor], version: int, in_use: int) -> tuple[str, list[int]]:
        """Write this rank's present shards as a version; return the region's path and the digest of each slot.

        `in_use`: the version that workers have, whose region is not written.

        Raises:
            NotFiniteError: a value is not finite.
        """
        if not self._slots:
            return "", []
        other = 1 if self._versions[0] == in_use else 0
        self._versions[other] = version
        digests = []
        for slot in self._slots:
            dtype = self.plan.specs[slot.tensor].dtype
            place = self._regions[other][slot.start : slot.start + slot.box.numel * dtype.itemsize]
            values = place.view(dtype)
            values.view(slot.box.size).copy_(read(slot.tensor, slot.box))
            if not is_good(values, infinities=False):
                raise NotFiniteError(f"{slot.tensor} is not finite: weights that are not finite are not taken")
            digests.append(digest_of(place))
        return self._paths[other], digests


@dataclass(frozen=True)
class PartsBucket(Bucket):
    """A bucket that carries no bytes: the place where they lie."""

    place: Place

    @staticmethod
    def of(place: Place) -> "PartsBucket":
        """Return the bucket of a place."""
        return PartsBucket((), torch.empty(0, dtype=torch.uint8), place)


def assembled(
    place: Place, worker: int, opened: Callable[[str], ReadBytes], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor of a place on a device, with the boxes that this worker reads, and zeros elsewhere.

    `opened(path)`: what reads another process's region.

    Raises:
        RuntimeError: a box is not what was staged.
    """
    regions = [opened(path) for path in place["regions"]]
    mine: defaultdict[int, list[list[Any]]] = defaultdict(list)
    for number in place["reads"][worker]:
        mine[place["slots"][number][1]].append(place["slots"][number])
    for number, (name, kind, shape) in enumerate(place["tensors"]):
        dtype = getattr(torch, kind)
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        for region, _, start, size, first, digest in mine[number]:
            nbytes = math.prod(size) * dtype.itemsize
            near = regions[region](first, nbytes)  # it crosses the link once
            if digest_of(near) != digest:
                raise RuntimeError(f"{name} is not what was staged")
            tensor[Box(tuple(start), tuple(size)).index] = near.view(dtype).view(size)
        yield name, tensor
