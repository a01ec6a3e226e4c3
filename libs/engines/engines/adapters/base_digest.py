"""A digest of every weight that is frozen: it tells which base an adapter belongs to."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from engines.adapters.lora import is_adapter
from engines.private_api import compute_local_shape_and_global_offset
from engines.weights.row_shards import counts_once

BASE = "lora_base"
"""Key of the base's digest in a checkpoint of adapters."""
_PIECE = 1 << 22
"""Number of elements that are summed at a time."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def base_digest(model: Any, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return u8[16], a digest of names, shapes, dtypes and all bits of the frozen parameters. Collective.

    The sum of each bit pattern times an odd number of its place, modulo 2^64: exact, so that it does not depend on how
    tensors are shared among ranks, and nothing is gathered.
    """
    frozen = [(name, tensor) for name, tensor in model.named_parameters() if not is_adapter(name)]
    device = frozen[0][1].device
    sums = [_sum(tensor).to(device) for _, tensor in frozen]
    return digest_of([(name, tuple(tensor.shape), tensor.dtype) for name, tensor in frozen], sums, group)


def digest_of(
    tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype]],
    sums: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return the digest of tensors (name, shape, dtype) from this rank's sums of their bits. Collective."""
    added = torch.stack(list(sums))
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(added, group=group)
    digest = hashlib.blake2b(digest_size=16)
    for (name, shape, dtype), bits in zip(tensors, added.tolist(), strict=True):
        digest.update(f"{name} {shape} {dtype} {bits}\n".encode())
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)


def check_base(saved: Tensor, own: Tensor, model: str | None) -> None:
    """Raise ValueError where the digest of a checkpoint differs from the engine's own."""
    if not torch.equal(saved, own):
        raise ValueError(
            f"the adapter was trained on another base than {model or 'this module'}: the weights under it differ; "
            "build the engine from the model that the adapter was trained on"
        )


def sum_of_bits(box: Tensor, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Return i64[], the sum over a box that begins at `start` of a tensor of this shape, at least one-dimensional."""
    total = torch.zeros((), dtype=torch.int64, device=box.device)
    if not box.numel():
        return total
    bits = box.detach().contiguous().view(_BITS[box.element_size()])
    inner = torch.zeros((), dtype=torch.int64, device=box.device)
    for size, first, length in zip(box.shape[1:], start[1:], shape[1:], strict=True):
        inner = inner.unsqueeze(-1) * length + torch.arange(first, first + size, device=box.device)
    rows, row = max(1, _PIECE // bits[0].numel()), math.prod(shape[1:])
    for at in range(0, len(bits), rows):
        piece = bits[at : at + rows].to(torch.int64)
        begin = torch.arange(start[0] + at, start[0] + at + len(piece), device=box.device) * row
        total = total + ((begin.view(-1, *(1,) * inner.ndim) + inner) * 2 * piece + piece).sum()
    return total


def _sum(tensor: Tensor) -> Tensor:
    """Return i64[], the sum over this rank's part; 0 where another rank has the same part and counts it."""
    shape, start, counts = tensor.shape, (0,) * tensor.ndim, counts_once(tensor)
    if isinstance(tensor, DTensor):
        _, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        tensor = tensor.to_local()
    if not counts:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    return sum_of_bits(tensor, start, shape) if tensor.ndim else sum_of_bits(tensor.view(1), (0,), (1,))
