"""Weights on their way out: named pieces of bounded size."""

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
    """Cut each tensor into pieces of at most max_bytes (at least one element), in order; an empty tensor is one
    piece."""
    if max_bytes < 1:
        raise ValueError(f"max_bytes must be at least 1, got {max_bytes}")
    for name, tensor in tensors:
        flat = tensor.detach().reshape(-1)
        step = max(1, max_bytes // max(1, flat.element_size()))
        for offset in range(0, max(1, flat.numel()), step):
            yield WeightPiece(name, tuple(tensor.shape), tensor.dtype, offset, flat[offset : offset + step])


def assemble(parts: Iterable[WeightPiece]) -> dict[str, Tensor]:
    """The tensors again; ValueError names one that has a gap. The plain inverse, for tests and small models."""
    out: dict[str, Tensor] = {}
    filled: dict[str, int] = {}
    for part in parts:
        if part.name not in out:
            out[part.name] = torch.empty(part.shape, dtype=part.dtype)
            filled[part.name] = 0
        if part.offset != filled[part.name]:
            raise ValueError(f"{part.name}: a piece begins at {part.offset}, expected {filled[part.name]}")
        out[part.name].view(-1)[part.offset : part.offset + part.flat.numel()] = part.flat.cpu()
        filled[part.name] += part.flat.numel()
    for name, tensor in out.items():
        if filled[name] != tensor.numel():
            raise ValueError(f"{name}: {filled[name]} of {tensor.numel()} elements arrived")
    return out
