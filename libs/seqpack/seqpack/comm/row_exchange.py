"""The exchange of rows by a plan: flat bytes of tensors, from the rank that has a row to those that need it."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from seqpack.comm.collectives import Group, host_or_device
from seqpack.comm.row_plan import RowPlan

ALIGNED = 8
"""Bytes to a multiple of which each tensor of a row is filled up, so that any dtype can be viewed in place."""


class Column(NamedTuple):
    """One tensor of a row: its name, dtype and shape. With them the bytes of a row need no head."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor, without what fills them up."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def columns_of(tensors: Mapping[str, Tensor]) -> tuple[Column, ...]:
    """Return the columns of a row."""
    return tuple(Column(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())


def row_bytes(columns: Sequence[Column]) -> int:
    """Return the bytes of a row with these columns."""
    return sum(_filled(column.nbytes) for column in columns)


def flatten_row(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the tensors of a row one after another, uint8 of `row_bytes`, on the host."""
    parts = []
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        parts += [flat, flat.new_zeros(_filled(len(flat)) - len(flat))]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.uint8)


def unflatten_row(flat: Tensor, columns: Sequence[Column]) -> dict[str, Tensor]:
    """Return the tensors of a row, views of `flat`.

    Raises:
        ValueError: it has other bytes than these columns.
    """
    if len(flat) != row_bytes(columns):
        raise ValueError(f"{len(flat)} bytes are no row of {row_bytes(columns)}")
    tensors, begin = {}, 0
    for column in columns:
        tensors[column.name] = flat[begin : begin + column.nbytes].view(column.dtype).view(column.shape)
        begin += _filled(column.nbytes)
    return tensors


def exchange_rows(plan: RowPlan, own: Callable[[int], Tensor], group: Group = None) -> dict[int, Tensor]:
    """Return the rows that this rank needs, uint8[size] each, by number. Collective where any row travels.

    `own`: returns a row that this rank holds; it is asked for each that is sent or needed here. Rows that arrive share
    one buffer.

    Raises:
        ValueError: a row of this rank has another size than the plan says.
    """
    rank = dist.get_rank(group) if len(plan.wanted) > 1 else 0

    def held(row: int) -> Tensor:
        flat = own(row)
        if flat.dtype != torch.uint8 or flat.shape != (plan.sizes[row],):
            raise ValueError(f"row {row} is {flat.dtype} {tuple(flat.shape)}, the plan says {plan.sizes[row]} bytes")
        return flat

    rows = {row: held(row) for row in sorted(plan.wanted[rank]) if plan.holders[row] == rank}
    if not plan.total_bytes:
        return rows | {row: torch.zeros(0, dtype=torch.uint8) for row in plan.wanted[rank] - rows.keys()}
    sends, receives = plan.sends(rank), plan.receives(rank)
    device, copies = host_or_device(group), {row: held(row) for row in sorted({r for part in sends for r in part})}
    outgoing = [copies[row] for part in sends for row in part]
    sent = (torch.cat(outgoing) if outgoing else torch.zeros(0, dtype=torch.uint8)).to(device)
    del copies, outgoing
    arrived = torch.empty(plan.received_bytes(rank), dtype=torch.uint8, device=device)
    arriving, leaving = ([sum(plan.sizes[row] for row in part) for part in parts] for parts in (receives, sends))
    dist.all_to_all_single(arrived, sent, arriving, leaving, group=group)
    order = [row for part in receives for row in part]
    parts = arrived.cpu().split([plan.sizes[row] for row in order])
    return rows | dict(zip(order, parts, strict=True))


def _filled(nbytes: int) -> int:
    return -(-nbytes // ALIGNED) * ALIGNED
