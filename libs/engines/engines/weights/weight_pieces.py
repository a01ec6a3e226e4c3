"""Named pieces of weights, of bounded size, for export."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class WeightPiece(NamedTuple):
    """`flat` holds elements offset .. offset + len(flat) of the tensor `name` of this shape and dtype, row by row."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    flat: Tensor


def pieces(tensors: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[WeightPiece]:
    """Cut each tensor into pieces of at most max_bytes (at least one element), in order; an empty one is one piece."""
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
    for name, tensor in tensors:
        flat = tensor.detach().reshape(-1)
        step = max(1, max_bytes // max(1, flat.element_size()))
        for offset in range(0, max(1, flat.numel()), step):
            yield WeightPiece(name, tuple(tensor.shape), tensor.dtype, offset, flat[offset : offset + step])
