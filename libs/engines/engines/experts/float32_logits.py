"""A router's logits in float32, of hidden states and weights in a smaller dtype.

Near a tie, logits rounded to bfloat16 choose another expert; so do not round them. On a GPU the operands stay as they
are, whose products are added up in float32 anyway; gradients of both are in their own dtypes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


def float32_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return logits [..., E] of x [..., H] and weight [E, H], in float32; float64 of float64."""
    if x.dtype in (torch.float32, torch.float64):
        return linear(x, weight)
    logits: Tensor = _Logits.apply(x.flatten(0, -2), weight)
    return logits.view(*x.shape[:-1], -1)


class _Logits(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        if x.is_cuda:
            return torch.mm(x, weight.t(), out_dtype=torch.float32)
        return x.float() @ weight.float().t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad = grads[0].to(x.dtype)
        return grad @ weight, grad.t() @ x
