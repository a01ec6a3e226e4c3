"""Where packed tokens go: boundary checks, and the two copies (put, take) that every plain torch path is made of.

A packed tensor has its tokens in dimension 0. `put_rows` writes the tokens to distinct places of a zero-filled buffer,
`take_rows` reads them back; each is the gradient of the other, so nothing is ever summed over duplicate places.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def lengths_of(cu_seqlens: Tensor, total: int, name: str = "cu_seqlens") -> list[int]:
    """Return the lengths of sequences from their cumulative boundaries, after checking them.

    Args:
        cu_seqlens: int32 or int64 [n + 1], starting at 0 and ending at `total`; sequences of length 0 are allowed.
        total: number of packed tokens.
        name: what to call the tensor in errors.

    Raises:
        ValueError: the boundaries are not such a tensor; the text names the first bad entry.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"{name} must be a one-dimensional int32 or int64 tensor with n + 1 entries, "
            f"got {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}"
        )
    edges = cu_seqlens.tolist()
    if edges[0] != 0:
        raise ValueError(f"{name} must start at 0, got {edges[0]}")
    if edges[-1] != total:
        raise ValueError(f"{name} ends at {edges[-1]}, but there are {total} packed tokens")
    lengths = [b - a for a, b in pairwise(edges)]
    for index, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"{name} decreases at entry {index + 1}: {edges[index]} -> {edges[index + 1]}")
    return lengths


def positions_of(lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return (sequence index, position in the sequence) of every packed token, both int64 [T]."""
    starts = lengths.cumsum(0) - lengths
    sequence = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
    position = torch.arange(sequence.numel(), device=lengths.device) - starts[sequence]
    return sequence, position


class _Put(torch.autograd.Function):
    """Write row t of x to buffer[rows[t], :, columns[t]]; rows and columns together are distinct."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, columns: Tensor, num_rows: int, num_columns: int) -> Tensor:
        ctx.save_for_backward(rows, columns)
        buffer = x.new_zeros(num_rows, x.shape[1], num_columns, *x.shape[2:])
        buffer[rows, :, columns] = x
        return buffer

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        rows, columns = ctx.saved_tensors
        return _Take.apply(grads[0], rows, columns), None, None, None, None


class _Take(torch.autograd.Function):
    """Read buffer[rows[t], :, columns[t]] as row t; rows and columns together are distinct."""

    @staticmethod
    def forward(ctx: Any, buffer: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        ctx.save_for_backward(rows, columns)
        ctx.shape = buffer.shape
        return buffer[rows, :, columns]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        rows, columns = ctx.saved_tensors
        return _Put.apply(grads[0], rows, columns, ctx.shape[0], ctx.shape[2]), None, None


def put_rows(x: Tensor, rows: Tensor, columns: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """Scatter packed tokens [T, H, ...] into a zero-padded [num_rows, H, num_columns, ...].

    Args:
        x: packed tokens [T, H, ...].
        rows: int64 [T], the row of each token.
        columns: int64 [T], its column; no two tokens share (row, column).
        num_rows: rows of the buffer.
        num_columns: columns of the buffer.
    """
    result: Tensor = _Put.apply(x, rows, columns, num_rows, num_columns)
    return result


def take_rows(buffer: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Undo `put_rows`: gather [T, H, ...] from [num_rows, H, num_columns, ...], by the same rows and columns."""
    result: Tensor = _Take.apply(buffer, rows, columns)
    return result


def row_blocks(x: Tensor, numbers: int = 1 << 18) -> list[slice]:
    """Return blocks of rows of x [N, D]: on a CPU so small that each reuses the memory of the one before, else one."""
    total, features = x.shape
    size = max(16, numbers // max(1, features)) if x.device.type == "cpu" else max(1, total)
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]
