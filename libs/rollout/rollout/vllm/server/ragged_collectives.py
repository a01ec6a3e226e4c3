"""Collectives over gloo for rows of uneven numbers: gather all rows on all ranks, and sum each rank's rows.

torch's own collectives need one size of all ranks; both use `all_to_all_single`, which takes any, none too.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor


def gather_rows(parts: Sequence[Tensor], sizes: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Gather the rows of all ranks, in the order of the ranks, of each of several tensors, in one exchange.

    Args:
        parts: this rank's part of each tensor, [sizes[rank], ...], of any dtypes.
        sizes: number of rows of each rank.
        group: the process group.

    Raises:
        ValueError: a part has other than this rank's number of rows.
    """
    rows, ranks = sizes[dist.get_rank(group)], len(sizes)
    for part in parts:
        if part.shape[0] != rows:
            raise ValueError(f"a part of {part.shape[0]} rows, where this rank has {rows} of {list(sizes)}")
    flat = [_in_bytes(part) for part in parts]
    own = torch.cat(flat, dim=1)
    width = own.shape[1]
    received = own.new_empty(sum(sizes), width)
    dist.all_to_all_single(received, own.repeat(ranks, 1), list(sizes), [rows] * ranks, group=group)
    columns = [0, *accumulate(one.shape[1] for one in flat)]
    return [
        _whole(received[:, begin:end]).view(part.dtype).reshape(sum(sizes), *part.shape[1:])
        for part, (begin, end) in zip(parts, pairwise(columns), strict=True)
    ]


def sum_rows(parts: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """Return the sum over all ranks of this rank's rows; added in float32, in the order of the ranks.

    Args:
        parts: this rank's addend to the rows of all ranks, [sum(sizes), ...].
        sizes: number of rows of each rank.
        group: the process group.

    Raises:
        ValueError: there are other than that many rows.
    """
    if parts.shape[0] != sum(sizes):
        raise ValueError(f"{parts.shape[0]} rows, where the ranks have {list(sizes)}")
    rows, ranks, rest = sizes[dist.get_rank(group)], len(sizes), parts.shape[1:]
    flat = _in_bytes(parts)
    received = flat.new_empty(ranks * rows, flat.shape[1])
    dist.all_to_all_single(received, flat, [rows] * ranks, list(sizes), group=group)
    addends = received.view(parts.dtype).reshape(ranks, rows, *rest)
    return addends.sum(0, dtype=torch.float32 if parts.dtype.itemsize < 4 else parts.dtype).to(parts.dtype)


def _in_bytes(part: Tensor) -> Tensor:
    """Return the rows as bytes u8[rows, bytes of a row]."""
    return _whole(part.reshape(part.shape[0], prod(part.shape[1:]))).view(torch.uint8)


def _whole(part: Tensor) -> Tensor:
    """Return a copy at an address for any dtype; `contiguous` keeps the old strides of a single row or column."""
    return part.clone(memory_format=torch.contiguous_format)
