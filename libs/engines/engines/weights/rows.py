"""Which rows of a tensor a rank holds."""

from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def rows_of(size: int, parts: int, index: int) -> slice:
    """Return the rows of part `index` when `size` rows are cut as by torch.chunk; empty where there are fewer parts."""
    each = -(-size // parts)
    return slice(min(index * each, size), min((index + 1) * each, size))


class Own(NamedTuple):
    """What this rank holds of a tensor: the rows of `part`, and of their second dimension `columns` (None: all)."""

    part: Tensor
    rows: slice
    columns: slice | None = None


def own_part(tensor: Tensor) -> Own:
    """Of a tensor that is whole, sharded along dimension 0 (FSDP2), or a layer's experts over a mesh of two dimensions.

    These are sharded along dimension 1 over the mesh's first dimension, and along dimension 0 over its second one.
    """
    if not isinstance(tensor, DTensor):
        return Own(tensor, slice(0, tensor.shape[0] if tensor.ndim else 1))
    mesh = tensor.device_mesh
    if tensor.placements == (Shard(0),):
        return Own(tensor.to_local(), rows_of(tensor.shape[0], mesh.size(), mesh.get_local_rank()))
    if tensor.placements == (Shard(1), Shard(0)):
        columns, rows = (rows_of(tensor.shape[1 - i], mesh.size(i), mesh.get_local_rank(i)) for i in (0, 1))
        return Own(tensor.to_local(), rows, columns)
    raise ValueError(
        f"a tensor is placed {tensor.placements}: only shards of rows, or of experts, are read and written"
    )
