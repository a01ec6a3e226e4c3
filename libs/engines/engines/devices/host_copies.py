"""Tensors of a device in host memory: pinned blocks that are kept, and filled again the next time.

A copy from pageable memory goes through small pinned buffers of the driver's, a few GB a second; pinning anew costs
more than it saves. So 1. tensors are laid out in blocks (`layout`, pure); 2. all are copied without waiting; 3. they
are waited for once. torch rounds what it pins up to powers of two, so blocks are of these sizes, and filled.

Invariants, each with a test: what comes back is what went away, bit for bit; the second time allocates nothing; where
memory cannot be pinned it is pageable, and the log says so.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engines.devices.detect import devices_of
from engines.private_api import is_traceable_wrapper_subclass

LOG = logging.getLogger(__name__)
BLOCK = 2**28
"""Bytes of a block, unless a tensor is larger or fewer are left."""
_ALIGNED = 256


@dataclass(frozen=True)
class Layout:
    """Sizes of blocks in bytes, and for each tensor its block and where in it."""

    blocks: tuple[int, ...]
    places: tuple[tuple[int, int], ...]


def layout(sizes: Sequence[int]) -> Layout:
    """Lay out tensors of so many bytes, the largest first, each in the first block with enough space."""
    taken = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    left, blocks, used = sum(taken), list[int](), list[int]()
    places = [(0, 0)] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-taken[i], i)):
        size = taken[index]
        block = next((b for b, full in enumerate(used) if full + size <= blocks[b]), None)
        if block is None:
            block = len(blocks)
            blocks.append(1 << (max(size, min(left, BLOCK), 1) - 1).bit_length())
            used.append(0)
        places[index] = block, used[block]
        used[block] += size
        left -= size
    return Layout(tuple(blocks), tuple(places))


class HostCopies:
    """A store in host memory for tensors that move there from time to time; it keeps its memory in between."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []

    def of(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return finished host copies of contiguous tensors of one device; the next call overwrites them.

        Tensors in host memory are cloned.
        """
        if not tensors or tensors[0].device.type == "cpu":
            return [tensor.clone() for tensor in tensors]
        plan = layout([tensor.nbytes for tensor in tensors])
        if [block.nbytes for block in self.blocks] != [*plan.blocks]:
            self.blocks = []  # those of an engine without moments, say: freed first
            self.blocks = [_block(size) for size in plan.blocks]
        copies = []
        for tensor, (block, start) in zip(tensors, plan.places, strict=True):
            flat = self.blocks[block][start : start + tensor.nbytes].view(tensor.dtype)
            copies.append(flat.view(tensor.shape).copy_(tensor, non_blocking=True))
        devices_of(tensors[0].device).current_stream().synchronize()
        return copies

    def moved(self, tensors: Sequence[Tensor], device: torch.device) -> dict[int, Tensor]:
        """Return copies on `device`, by the `id` of each tensor given; shards stay shards.

        Tensors that are there already, or are not contiguous, are left out.
        """
        going = [tensor for tensor in {id(tensor): tensor for tensor in tensors}.values() if _moves(tensor, device)]
        inner = [_inner(tensor) for tensor in going]
        if device.type == "cpu":
            copies = self.of(inner)
        else:
            copies = [tensor.to(device, non_blocking=True) for tensor in inner]
            if copies:
                devices_of(device).current_stream().synchronize()
        return {id(tensor): _around(tensor, copy) for tensor, copy in zip(going, copies, strict=True)}


def pinned(size: int) -> Tensor:
    """Return u8[size] of pinned host memory. RuntimeError where there is none."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _block(size: int) -> Tensor:
    try:
        return pinned(size)
    except RuntimeError as error:
        LOG.warning("offload: %d MiB of host memory cannot be pinned, moves are slower (%s)", size >> 20, error)
        return torch.empty(size, dtype=torch.uint8)


def _moves(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type != device.type and _inner(tensor).is_contiguous()


def _parts(tensor: Tensor) -> tuple[str, dict[str, Any], Any]:
    """Return (name of the part with the memory, parts by name, context) of a shard, by torch's wrapper protocol."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: getattr(tensor, name) for name in names}
    (own,) = (name for name, part in parts.items() if isinstance(part, Tensor))
    return own, parts, context


def _inner(tensor: Tensor) -> Tensor:
    """Return the tensor that has the memory of a shard; a plain tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.detach()
    own, parts, _ = _parts(tensor)
    inner: Tensor = parts[own]
    return inner.detach()


def _around(tensor: Tensor, inner: Tensor) -> Tensor:
    """Return a shard like `tensor` over the memory of `inner`."""
    if not is_traceable_wrapper_subclass(tensor):
        return inner
    own, parts, context = _parts(tensor)
    made: Any = type(tensor)
    around: Tensor = made.__tensor_unflatten__(parts | {own: inner}, context, tensor.shape, tensor.stride())
    return around.detach()
