"""Matrix products of rows that are sorted by expert, with a matrix an expert: forward, and both gradients.

`torch.nn.functional.grouped_mm` computes them where it takes the dtype and the sizes; else one product after another,
of experts that have rows. For a compiler each is an operation of one node (`torch.ops.engines`), which it takes as it
is; elsewhere they are called without the time that such an operation takes.

Shapes: S rows, E experts; `ends` i32[E], the number of rows up to the end of each expert's; a weight is [E, out, in].
"""

# ruff: noqa: ARG001 (a fake has the arguments of its operation)
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import grouped_mm

ALIGNMENT = 16
"""Bytes that strides of its operands are multiples of."""
GROUPED = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}
"""Dtypes that torch's grouped product is used for, by kind of device."""


def grouped_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return y [S, out] of x [S, in]: each row times its expert's weight."""
    return _rows_node(x, weight, ends) if is_compiling() else _rows(x, weight.transpose(1, 2), ends)


def grouped_rows_grad(grad: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return d x [S, in] of `grouped_rows`, from d y [S, out]."""
    return _rows_grad_node(grad, weight, ends) if is_compiling() else _rows(grad, weight, ends)


def grouped_weight_grad(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return d weight [E, out, in] of `grouped_rows`, from d y [S, out] and x [S, in]; zero for experts without
    rows."""
    return _weight_grad_node(grad, x, ends) if is_compiling() else _weight_grad(grad, x, ends)


@torch.library.custom_op("engines::grouped_rows", mutates_args=())
def _rows_node(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _rows(x, weight.transpose(1, 2), ends)


@_rows_node.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("engines::grouped_rows_grad", mutates_args=())
def _rows_grad_node(grad: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return _rows(grad, weight, ends)


@_rows_grad_node.register_fake
def _(grad: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return grad.new_empty(grad.shape[0], weight.shape[2])


@torch.library.custom_op("engines::grouped_weight_grad", mutates_args=())
def _weight_grad_node(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return _weight_grad(grad, x, ends)


@_weight_grad_node.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


def _rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return rows [S, in] times weight [E, in, out]."""
    x = x.contiguous()
    if len(x) and _taken_by_torch(x, weight.shape[1], weight.shape[2]):
        return grouped_mm(x, weight, offs=ends)
    out = x.new_empty(len(x), weight.shape[2])
    for expert, rows in _groups(ends):
        torch.mm(x[rows], weight[expert], out=out[rows])
    return out


def _weight_grad(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    grad, x = grad.contiguous(), x.contiguous()
    if len(x) and _taken_by_torch(x, grad.shape[1], x.shape[1]):
        return grouped_mm(grad.t(), x, offs=ends)
    out = x.new_zeros(len(ends), grad.shape[1], x.shape[1])
    for expert, rows in _groups(ends):
        torch.mm(grad[rows].t(), x[rows], out=out[expert])
    return out


def _taken_by_torch(x: Tensor, *sizes: int) -> bool:
    aligned = all(size * x.element_size() % ALIGNMENT == 0 for size in sizes)
    return aligned and x.dtype in GROUPED.get(x.device.type, ())


def _groups(ends: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield (expert, its rows) of experts that have some; waits for the device."""
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            yield expert, slice(start, end)
        start = end
