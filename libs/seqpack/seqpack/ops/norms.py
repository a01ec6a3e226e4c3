"""Rows divided by their length or root mean square, as one operation: its own gradient, a block of rows at a time.

Written out in plain torch such a norm is a chain of eight passes over tensors that are made and thrown away; here what
is made on the way has the size of a block, and of the forward pass one number a row is kept.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from seqpack.ops.scatter_gather import row_blocks


def unit_rows(x: Tensor, eps: float, factor: float = 1.0) -> Tensor:
    """Return x / sqrt(sum of squares over D + eps) * factor, for x [..., D]."""
    result: Tensor = _Norm.apply(x.reshape(-1, x.shape[-1]), None, eps, factor)
    return result.view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean of squares over D + eps) * weight, x [..., D], weight [D] (Zhang, Sennrich 1910.07467)."""
    size = x.shape[-1]
    result: Tensor = _Norm.apply(x.reshape(-1, size), weight, eps * size, size**0.5)
    return result.view(x.shape)


class _Norm(torch.autograd.Function):
    """factor * weight * n with n = x * r and r = (sum x^2 + eps)^-1/2, for x [N, D] and weight [D] or None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, factor: float) -> Tensor:
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().add_(eps).rsqrt_()
        y: Tensor = x * r
        ctx.save_for_backward(x, weight, r)
        ctx.factor = factor
        return y.mul_(factor if weight is None else weight * factor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (grad,) = grads
        x, weight, r = ctx.saved_tensors
        scale = None if weight is None else weight * ctx.factor
        d_x, d_weight = torch.empty_like(x), None if weight is None else torch.zeros_like(weight)
        for rows in row_blocks(x):
            n, here = x[rows] * r[rows], d_x[rows]
            along = grad[rows] * n
            if d_weight is not None:
                d_weight += along.sum(0)
                along *= scale
            torch.mul(grad[rows], ctx.factor if scale is None else scale, out=here)
            along = along.sum(-1, keepdim=True)
            here.addcmul_(n, along if weight is not None else along * ctx.factor, value=-1).mul_(r[rows])
        if d_weight is not None:
            d_weight *= ctx.factor
        return d_x, d_weight, None, None
