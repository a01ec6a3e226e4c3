"""Weights on their way to vLLM: two files in memory that both processes see, one in use, the other for what comes.

Every tensor has a digest, which each worker of vLLM computes again of what it reads.

1. `prepare` and `receive` write into the file that is not in use, with all checks of `rollout.sync`.
2. `commit` turns the two around; vLLM then reads the other file.
3. `abort` turns them back; the old weights are whole in their file until the next transfer begins.

The files have no name (memfd): they go when the last process that holds them does, however it ends.
"""

import mmap
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from safetensors import safe_open
except ImportError as error:
    raise ImportError("the vLLM engine reads safetensors files: pip install 'tessera-rollout[vllm]'") from error

from rollout.sync.pieces import BucketPiece
from rollout.sync.staging import WeightStaging
from rollout.vllm.digest import digest_of

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


class WeightFile:
    """A file in memory with a tensor at each slot. `path` is valid in this process and, by its number, in a child."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        slots = tuple(slots)
        self.nbytes = max((slot.start + slot.nbytes for slot in slots), default=0)
        self.descriptor = os.memfd_create("tessera-weights")
        os.ftruncate(self.descriptor, max(self.nbytes, 1))
        self._digests: dict[str, int] | None = None
        self._map = mmap.mmap(self.descriptor, max(self.nbytes, 1))
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
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
        """Let the descriptor go; the memory follows with the last view of it."""
        os.close(self.descriptor)


class SharedWeights(WeightStaging):
    """`WeightStaging` over the two files: what is staged lies in one, and a swap is a change of which is in use.

    Args:
        shapes: the tensors that a transfer brings, by their names on disk.
        aliases: further names of a tensor (a tied head).
        version: the number of the weights that the first file is filled with.
    """

    def __init__(self, shapes: Mapping[str, Tensor], aliases: Mapping[str, str], version: int) -> None:
        self.slots = _slots(shapes)
        self.files = (WeightFile(self.slots), WeightFile(self.slots))
        self.in_use = 0
        super().__init__(self.files[0].tensors, aliases, version=version, allocate=self._allocate)

    @property
    def nbytes(self) -> int:
        """Of one set of weights."""
        return self.files[0].nbytes

    def told(self, place: int) -> tuple[str, dict[str, int]]:
        """The path of a file, as this process and its children see it, and the digests of its tensors."""
        file = self.files[place]
        return f"/proc/self/fd/{file.descriptor}", file.digests

    def close(self) -> None:
        """Let both files go."""
        for file in self.files:
            file.close()

    def _allocate(self, name: str, target: Tensor) -> Tensor:
        """The place of a tensor in the file that is not in use; memory of its own for another name of it."""
        if name in self._aliases:
            return torch.empty(target.numel(), dtype=target.dtype)
        return self.files[1 - self.in_use].tensors[name].view(-1)

    def _current(self) -> Mapping[str, Tensor]:
        return self.files[self.in_use].tensors

    def _swap(self, values: dict[str, Tensor]) -> None:
        spare = self.files[1 - self.in_use].tensors
        for name in spare.keys() - values.keys():  # an adapter is not on them
            spare[name].copy_(self._current()[name])
        for name, value in values.items():
            if value.data_ptr() != spare[name].data_ptr():  # it came under its other name
                spare[name].copy_(value)
        self.files[1 - self.in_use].note_digests()
        self.in_use = 1 - self.in_use

    def _swap_back(self, values: dict[str, Tensor]) -> None:
        del values  # the old weights lie in their file as they were
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
    """The tensors of a Hugging Face directory by name, without their values.

    Raises:
        ValueError: it has no safetensors files.
    """
    with torch.device("meta"):
        return {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in _headers(model)}


def checkpoint_pieces(model: Path) -> Iterable[BucketPiece]:
    """The tensors of a Hugging Face directory, one a piece."""
    for path in _files(model):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  it is no dictionary
                tensor = file.get_tensor(name)
                yield BucketPiece(name, tuple(tensor.shape), tensor.dtype, 0, tensor.reshape(-1))


def copy_rate(file: WeightFile) -> float:
    """Bytes a second at which this host copies memory, measured once on a file of weights: the link's rate."""
    source = torch.ones(max(file.nbytes, 1 << 24), dtype=torch.uint8)
    goal = torch.zeros_like(source)
    begun = time.perf_counter()
    goal.copy_(source)
    return source.numel() / (time.perf_counter() - begun)


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
    """The head's name and that of the embedding it is tied to; nothing where it has weights of its own."""
    names = list(checkpoint_shapes(model))
    embeddings = [name for name in names if name.endswith("embed_tokens.weight")]
    if not described.get("tie_word_embeddings") or "lm_head.weight" in names or not embeddings:
        return {}
    return {"lm_head.weight": embeddings[0]}
