"""Weight sync to vLLM: two regions that both processes see, one in use, the other for new weights.

A region is a file in host memory, or memory of the accelerator that both compute on. Every tensor has a digest, which
each worker of vLLM computes again of what it reads.

1. `prepare` and `receive` write into the region that is not in use, with all checks of `rollout.sync`.
2. `commit` swaps the two; vLLM then reads the other one.
3. `abort` swaps them back; the old weights are whole in their region until the next weight sync begins.

A file has no name (memfd), and a device's memory a handle: both end with the processes that hold them.
"""

import json
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
from rollout.sync.tensor_digest import digests_of
from rollout.vllm.weights import cuda_memory
from rollout.vllm.weights.parts import Place

_ALIGN = 64


@dataclass(frozen=True)
class Transfer:
    """Costs of the last weight sync."""

    nbytes: int
    staged_s: float
    """Seconds of writing beside the weights in use, while vLLM goes on."""
    paused_s: float
    """Seconds of vLLM's reading, between two of its steps."""
    link_share: float
    """Bytes a second, from the first to the last moment of both, relative to this host's copying of memory."""


class Slot(NamedTuple):
    """Place of a tensor in a file of weights; `start` counts bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return prod(self.shape) * self.dtype.itemsize

    def plain(self) -> list[Any]:
        """Return the fields for a message."""
        return [self.name, str(self.dtype).removeprefix("torch."), list(self.shape), self.start]


class WeightRegion:
    """A run of bytes with a tensor at each slot, which other processes find by `path`.

    Args:
        whole: `u8[nbytes]`, the bytes.
        path: path by which a worker opens them.
        inherited: descriptors that it must inherit to do so.
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
        """Compute the `digests` of the present tensors."""
        self._digests = dict(zip(self.tensors, digests_of([*self.tensors.values()]), strict=True))

    @property
    def digests(self) -> dict[str, int]:
        """Digest of each tensor when they were last computed; else of its present value."""
        if self._digests is None:
            self.note_digests()
        assert self._digests is not None
        return self._digests

    def close(self) -> None:
        """Release what the process holds beside the bytes, which are freed with the last view of them."""
        if self._pinned is not None:
            cuda_memory.unpin(self._pinned)
            self._pinned = None
        for descriptor in self.inherited:
            os.close(descriptor)


def file_region(slots: Sequence[Slot]) -> WeightRegion:
    """Make a region in a file in host memory, which is in no file system."""
    size = max(bytes_of(slots), 1)
    descriptor = os.memfd_create("tessera-weights")
    os.ftruncate(descriptor, size)
    whole = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
    pinned = _has_cuda() and cuda_memory.pin_if_allowed(whole)
    return WeightRegion(slots, whole, f"/proc/self/fd/{descriptor}", (descriptor,), pinned)


def device_region(slots: Sequence[Slot]) -> WeightRegion:
    """Make a region in memory of the current CUDA device.

    Raises:
        ValueError: there is no such device.
        RuntimeError: it has not enough.
    """
    if not _has_cuda():
        raise ValueError("weights_on_device needs a CUDA device that trainer and vLLM share: leave it out here")
    whole = cuda_memory.allocate(max(bytes_of(slots), 1))
    return WeightRegion(slots, whole, cuda_memory.path_of(whole))


def bytes_of(slots: Iterable[Slot]) -> int:
    """Return the number of bytes up to the end of the last slot."""
    return max((slot.start + slot.nbytes for slot in slots), default=0)


class SharedWeights(WeightStaging):
    """`WeightStaging` over the two regions: staged weights lie in one, and a swap changes which is in use.

    Args:
        shapes: the tensors of a weight sync, by their names on disk.
        aliases: further names of a tensor (a tied head).
        version: the version of the weights in the first region.
        on_device: whether the regions are memory of the current CUDA device instead of files.

    Raises:
        ValueError: there is no such device.
        RuntimeError: it has not enough memory for two sets of weights.
    """

    def __init__(
        self, shapes: Mapping[str, Tensor], aliases: Mapping[str, str], version: int, on_device: bool = False
    ) -> None:
        self.slots = _slots(shapes)
        new_region = device_region if on_device else file_region
        self.regions = (new_region(self.slots), new_region(self.slots))
        self.in_use = 0
        self._parts: Place | None = None
        self._staged_parts: Place | None = None
        self._last: tuple[str | Place, dict[str, int]] | None = None
        self._undo: tuple[Place | None, int] | None = None
        """Parts in use and the version before a commit that is not settled."""
        super().__init__(self.regions[0].tensors, aliases, version=version, allocate=self._allocate)

    @property
    def nbytes(self) -> int:
        """Number of bytes of one set of weights."""
        return bytes_of(self.slots)

    @property
    def device(self) -> torch.device:
        """Device of the regions."""
        return next((tensor.device for tensor in self.regions[0].tensors.values()), torch.device("cpu"))

    @property
    def place(self) -> tuple[str | Place, dict[str, int]]:
        """Where the weights in use are read: a region's path and the digests of its tensors, or parts."""
        return self.locate(self.in_use) if self._parts is None else (self._parts, {})

    @property
    def place_before(self) -> tuple[str | Place, dict[str, int]]:
        """Where those before the last commit are."""
        assert self._last is not None
        return self._last

    def stage_parts(self, place: Place) -> None:
        """Stage weights that lie in parts elsewhere (`rollout.vllm.weights.parts`), all of them at once.

        Raises:
            ValueError: no sync was begun.
        """
        self._begun()
        self._staged_parts = place

    def commit(self, version: int) -> None:
        """Use what is staged: parts, or the other region; see `WeightStaging`."""
        last, parts, old = self.place, self._parts, self._version
        if self._staged_parts is None:
            super().commit(version)
            self._parts = None
        else:
            manifest = self._begun()
            if version != manifest.version:
                raise ValueError(f"cannot commit weights {version}: those being received are {manifest.version}")
            self._parts, self._staged_parts, self._manifest = self._staged_parts, None, None
            self._version = self._newest = version
        self._last, self._undo = last, (parts, old)

    def abort(self) -> None:
        """Drop what is staged, or restore what was in use before a commit that is not settled."""
        self._staged_parts = None
        if self._undo is not None:
            (self._parts, old), self._undo = self._undo, None
            super().abort()
            self._version = old
        else:
            super().abort()

    def settle(self) -> None:
        """Let what was in use before a commit go."""
        self._undo = None
        super().settle()

    def locate(self, region: int) -> tuple[str, dict[str, int]]:
        """Return the path of a region, as this process and its children see it, and the digests of its tensors."""
        return self.regions[region].path, self.regions[region].digests

    @property
    def inherited(self) -> list[int]:
        """Descriptors that a process must inherit to find the regions."""
        return [descriptor for region in self.regions for descriptor in region.inherited]

    def close(self) -> None:
        """Close both regions."""
        for region in self.regions:
            region.close()

    def _allocate(self, name: str, target: Tensor) -> Tensor:
        """Return a tensor's memory in the region that is not in use; new memory for a further name of it."""
        if name in self._aliases:
            return torch.empty(target.numel(), dtype=target.dtype, device=target.device)
        return self.regions[1 - self.in_use].tensors[name].view(-1)

    def _current(self) -> Mapping[str, Tensor]:
        return self.regions[self.in_use].tensors

    def _swap(self, values: dict[str, Tensor]) -> None:
        spare = self.regions[1 - self.in_use].tensors
        for name in spare.keys() - values.keys():  # they have no adapter
            spare[name].copy_(self._current()[name])
        for name, value in values.items():
            if value.data_ptr() != spare[name].data_ptr():  # it came under its other name
                spare[name].copy_(value)
        self.regions[1 - self.in_use].note_digests()
        self.in_use = 1 - self.in_use

    def _swap_back(self, values: dict[str, Tensor]) -> None:
        del values  # the old weights are unchanged in their region
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
        ValueError: it has no safetensors file, or no index of several.
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
    """Return whether this process's accelerator is a CUDA device; beside another, torch.cuda is not called at all."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None and accelerator.type == "cuda"


def _files(model: Path) -> list[Path]:
    """Return the files that `from_pretrained` would read: one of all tensors goes before an index."""
    single, index = model / "model.safetensors", model / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise ValueError(
            f"{model} has no model.safetensors and no index of such files: vLLM's weights are read from those (load "
            "the model with transformers and save it again)"
        )
    try:
        names = {str(name) for name in json.loads(index.read_text())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of weights ({error!r})") from error
    return sorted(model / name for name in names)


def _headers(model: Path) -> Iterable[tuple[str, list[int], torch.dtype]]:
    for path in _files(model):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                yield name, part.get_shape(), _DTYPES[part.get_dtype()]


_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}


def tied_head(model: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the head and of the embedding that it is tied to; {} where it has weights of its own.

    A config that does not say has no head on disk because it is tied: that is the default of some families.
    """
    names = list(checkpoint_shapes(model))
    embeddings = [name for name in names if name.endswith("embed_tokens.weight")]
    if not config.get("tie_word_embeddings", True) or "lm_head.weight" in names or not embeddings:
        return {}
    return {"lm_head.weight": embeddings[0]}
