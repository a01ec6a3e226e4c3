"""The rows of a tensor that a rank holds."""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def rows_of(size: int, parts: int, index: int) -> slice:
    """Return the rows of part `index` when torch.chunk splits `size` rows; empty where there are fewer parts."""
    each = -(-size // parts)
    return slice(min(index * each, size), min((index + 1) * each, size))


class Own(NamedTuple):
    """This rank's part of a tensor: the rows of `part`, and of their second dimension `columns` (None: all)."""

    part: Tensor
    rows: slice
    columns: slice | None = None


def sharding_axes(tensor: DTensor) -> list[int]:
    """Return the mesh dimensions over which a tensor is sharded; over the others each rank has the same."""
    return [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]


def counts_once(tensor: Tensor) -> bool:
    """Return whether this rank's part counts in a sum over all ranks: of equal parts the first one does."""
    if not isinstance(tensor, DTensor):
        return not dist.is_initialized() or dist.get_rank() == 0
    copied = set(range(tensor.device_mesh.ndim)) - set(sharding_axes(tensor))
    return all(tensor.device_mesh.get_local_rank(axis) == 0 for axis in copied)


def own_part(tensor: Tensor) -> Own:
    """Return this rank's part of a tensor: whole, sharded along dimension 0 (FSDP2), or experts over a mesh of two
    dimensions.

    Experts are sharded along dimension 1 over the mesh's first dimension, and along dimension 0 over its second one.
    Dimensions of the mesh over which a tensor is replicated (hybrid sharding) are ignored.
    """
    if not isinstance(tensor, DTensor):
        return Own(tensor, slice(0, tensor.shape[0] if tensor.ndim else 1))
    mesh = tensor.device_mesh
    axes = sharding_axes(tensor)
    cuts = [tensor.placements[axis] for axis in axes]
    parts = [(mesh.size(axis), mesh.get_local_rank(axis)) for axis in axes]
    if cuts == [Shard(0)]:
        return Own(tensor.to_local(), rows_of(tensor.shape[0], *parts[0]))
    if cuts == [Shard(1), Shard(0)]:
        columns, rows = (rows_of(tensor.shape[1 - i], *parts[i]) for i in (0, 1))
        return Own(tensor.to_local(), rows, columns)
    raise ValueError(
        f"a tensor is placed {tensor.placements}: only shards of rows, or of experts, are read and written"
    )
