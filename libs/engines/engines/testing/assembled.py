"""The inverse of `engines.weights.weight_pieces.pieces`, for tests: tensors again from the pieces of an export."""

from collections.abc import Iterable

import torch
from torch import Tensor

from engines.weights.weight_pieces import WeightPiece


def assemble(parts: Iterable[WeightPiece]) -> dict[str, Tensor]:
    """Return the tensors of an export's pieces; ValueError names one with a gap."""
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
