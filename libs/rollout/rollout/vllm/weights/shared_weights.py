"""Weights on their way to vLLM: two regions that both processes see, one in use, the other for what comes.

A region is a file in host memory, or memory of the accelerator that both compute on. Every tensor has a digest, which
each worker of vLLM computes again of what it reads.

1. `prepare` and `receive` write into the region that is not in use, with all checks of `rollout.sync`.
2. `commit` turns the two around; vLLM then reads the other one.
3. `abort` turns them back; the old weights are whole in their region until the next transfer begins.

A file has no name (memfd), and a device's memory a handle: both go with the processes that hold them, however they end.
"""

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout.extras import missing_extra_message

try:
    from safetensors import safe_open
except ImportError as error:
    raise ImportError(missing_extra_message("the vLLM engine reads safetensors files", "vllm")) from error

from rollout.sync.pieces import BucketPiece
from rollout.sync.staging import WeightStaging
from rollout.sync.tensor_digest import digest_of
from rollout.vllm.weights import cuda_memory

_ALIGN = 64


@dataclass(frozen=True)
class Transfer:
    """What the last transfer of weights cost."""

    nbytes: int
    staged_s: float
    """Writing them beside those in use, while vLLM goes on."""
    paused_s: float
    """vLLM reading them, between two of its steps."""
    link_share: float
    """Bytes a second, from the first to the last moment of both, against this host's copying of memory."""


class Slot(NamedTuple):
    """Where a tensor lies in a file of weights; `start` counts bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Its length."""
        return prod(self.shape) * self.dtype.itemsize

    def plain(self) -> list[Any]:
        """As a message holds it."""
        return [self.name, str(self.dtype).removeprefix("torch."), list(self.shape), self.start]


class WeightRegion:
    """A tensor at each slot of a run of bytes, which other processes find by `path`.

    Args:
        whole: `u8[nbytes]`, the bytes.
        path: how a worker finds them.
        inherited: the descriptors that it must be born with to do so.
        pinned: whether they are host memory that `close` is to unpin.
    """

    def __init__(
        self, slots: Iterable[Slot], whole: Tensor, path: str, inherited: tuple[int, ...] = (), pinned: bool = False
    ) -> None:
        self.path, self.inherited = path, inherited
        self._pinned = whole if pinned else None
        self._digests: dict[str, int] | None = None
        self.tensors = {
            slot.name: whole[slot.start : slot.start + slot.nbytes].view(slot.dtype).view(slot.shape) for slot in slots
        }

    def note_digests(self) -> None:
        """Compute what `digests` tells from now on."""
        self._digests = {name: digest_of(tensor) for name, tensor in self.tensors.items()}

    @property
    def digests(self) -> dict[str, int]:
        """Of each tensor, when it was last noted; else as it is now."""
        if self._digests is None:
            self.note_digests()
        assert self._digests is not None
        return self._digests

    def close(self) -> None:
        """Let go what the process holds beside the bytes, which follow with the last view of them."""
        if self._pinned is not None:
            cuda_memory.unpin(self._pinned)
            self._pinned = None
        for descriptor in self.inherited:
            os.close(descriptor)


def file_region(slots: Sequence[Slot]) -> WeightRegion:
    """Return in a file in host memory, which is none of a file system's."""
    size = max(bytes_of(slots), 1)
    descriptor = os.memfd_create("tessera-weights")
    os.ftruncate(descriptor, size)
    whole = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    pinned = _has_cuda() and cuda_memory.pin_if_allowed(whole)
    return WeightRegion(slots, whole, f"/proc/self/fd/{descriptor}", (descriptor,), pinned)


def device_region(slots: Sequence[Slot]) -> WeightRegion:
    """Return in memory of the current CUDA device.

    Raises:
        ValueError: there is no such device.
        RuntimeError: it has not enough.
    """
    if not _has_cuda():
        raise ValueError("weights_on_device needs a CUDA device that trainer and vLLM share: leave it out here")
    whole = cuda_memory.allocate(max(bytes_of(slots), 1))
    return WeightRegion(slots, whole, cuda_memory.path_of(whole))


def bytes_of(slots: Iterable[Slot]) -> int:
    """Up to the end of the last slot."""
    return max((slot.start + slot.nbytes for slot in slots), default=0)


class SharedWeights(WeightStaging):
    """`WeightStaging` over the two regions: what is staged lies in one, and a swap is a change of which is in use.

    Args:
        shapes: the tensors that a transfer brings, by their names on disk.
        aliases: further names of a tensor (a tied head).
        version: the number of the weights that the first region is filled with.
        on_device: the regions are memory of the current CUDA device, not files.

    Raises:
        ValueError: there is no such device.
        RuntimeError: it has no room for two sets of weights.
    """

    def __init__(
        self, shapes: Mapping[str, Tensor], aliases: Mapping[str, str], version: int, on_device: bool = False
    ) -> None:
        self.slots = _slots(shapes)
        new_region = device_region if on_device else file_region
        self.regions = (new_region(self.slots), new_region(self.slots))
        self.in_use = 0
        super().__init__(self.regions[0].tensors, aliases, version=version, allocate=self._allocate)

    @property
    def nbytes(self) -> int:
        """Of one set of weights."""
        return bytes_of(self.slots)

    @property
    def device(self) -> torch.device:
        """Where the regions are."""
        return next((tensor.device for tensor in self.regions[0].tensors.values()), torch.device("cpu"))

    def told(self, region: int) -> tuple[str, dict[str, int]]:
        """Return the path of a region, as this process and its children see it, and the digests of its tensors."""
        return self.regions[region].path, self.regions[region].digests

    @property
    def inherited(self) -> list[int]:
        """The descriptors that a process must be born with to find the regions."""
        return [descriptor for region in self.regions for descriptor in region.inherited]

    def close(self) -> None:
        """Let both regions go."""
        for region in self.regions:
            region.close()

    def _allocate(self, name: str, target: Tensor) -> Tensor:
        """Return where a tensor lies in the region that is not in use; memory of its own for another name of it."""
        if name in self._aliases:
            return torch.empty(target.numel(), dtype=target.dtype, device=target.device)
        return self.regions[1 - self.in_use].tensors[name].view(-1)

    def _current(self) -> Mapping[str, Tensor]:
        return self.regions[self.in_use].tensors

    def _swap(self, values: dict[str, Tensor]) -> None:
        spare = self.regions[1 - self.in_use].tensors
        for name in spare.keys() - values.keys():  # an adapter is not on them
            spare[name].copy_(self._current()[name])
        for name, value in values.items():
            if value.data_ptr() != spare[name].data_ptr():  # it came under its other name
                spare[name].copy_(value)
        self.regions[1 - self.in_use].note_digests()
        self.in_use = 1 - self.in_use

    def _swap_back(self, values: dict[str, Tensor]) -> None:
        del values  # the old weights lie in their region as they were
        self.in_use = 1 - self.in_use


def _slots(shapes: Mapping[str, Tensor]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    end = 0
    for name, tensor in shapes.items():
        slot = Slot(name, tensor.dtype, tuple(tensor.shape), -(-end // _ALIGN) * _ALIGN)
        slots.append(slot)
        end = slot.start + slot.nbytes
    return tuple(slots)


def checkpoint_shapes(model: Path) -> dict[str, Tensor]:
    """Return the tensors of a Hugging Face directory by name, without their values.

    Raises:
        ValueError: it has no safetensors files.
    """
    with torch.device("meta"):
        return {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in _headers(model)}


def checkpoint_pieces(model: Path) -> Iterable[BucketPiece]:
    """Yield the tensors of a Hugging Face directory, one a piece."""
    for path in _files(model):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no dictionary
                tensor = file.get_tensor(name)
                yield BucketPiece(name, tuple(tensor.shape), tensor.dtype, 0, tensor.reshape(-1))


def _has_cuda() -> bool:
    """Return whether this process's accelerator is a CUDA device; beside another one, torch.cuda is not asked at
    all."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == "cuda"


def _files(model: Path) -> list[Path]:
    files = sorted(model.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{model} has no *.safetensors files: vLLM's weights are read from those")
    return files


def _headers(model: Path) -> Iterable[tuple[str, list[int], torch.dtype]]:
    for path in _files(model):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                yield name, part.get_shape(), _DTYPES[part.get_dtype()]


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}


def tied_head(model: Path, described: Mapping[str, Any]) -> dict[str, str]:
    """Return the head's name and that of the embedding it is tied to; nothing where it has weights of its own."""
    names = list(checkpoint_shapes(model))
    embeddings = [name for name in names if name.endswith("embed_tokens.weight")]
    if not described.get("tie_word_embeddings") or "lm_head.weight" in names or not embeddings:
        return {}
    return {"lm_head.weight": embeddings[0]}
