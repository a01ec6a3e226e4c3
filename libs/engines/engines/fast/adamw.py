"""AdamW in one pass over each tensor, with clipping and skipping inside: the host reads nothing before it.

A float32 weight that is computed with in bfloat16 is kept as two parts, the bfloat16 weight itself (rounded to
nearest) and an int16 rest, whose bits add up to those of the float32 exactly: 12 bytes a parameter with both moments,
where a float32 weight and a copy for computing take 14. `update` is the Triton kernel on a GPU and `update_plain`, its
reference, elsewhere. The formulas are those of torch.optim.AdamW (Loshchilov and Hutter, arXiv 1711.05101).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from engines.fast.triton_kernels import triton_module


@dataclass(frozen=True)
class AdamW:
    """The settings of an update."""

    lr: float
    betas: tuple[float, float]
    eps: float


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 as (bfloat16 rounded to nearest, int16 rest); `join` gives it back bit for bit.

    Rounding to nearest can move up by half a step, 32768 units, of which int16 holds one fewer: such a weight, one
    in 65536, comes back one unit of its last place lower. Values that are not finite are not meant.
    """
    rounded = weight.to(torch.bfloat16)
    rest = weight.view(torch.int32) - (rounded.view(torch.int16).to(torch.int32) << 16)
    return rounded, rest.clamp_(max=32767).to(torch.int16)


def join(weight: Tensor, rest: Tensor) -> Tensor:
    """Return the float32 that `split` took apart."""
    return ((weight.view(torch.int16).to(torch.int32) << 16) + rest.to(torch.int32)).view(torch.float32)


def control(norm: Tensor, limit: float | None, step: Tensor, betas: tuple[float, float]) -> Tensor:
    """Return f32[3] for `update`: the factor of gradients, and 1 / (1 - beta ** step) of both moments.

    `norm` of the gradients, `limit` that it is clipped to (None: no limit), `step` f64[] counted from 1. The factor
    is NaN where the norm is not finite, which makes no update.
    """
    norm = norm.detach().double().reshape(1)
    factor = torch.ones_like(norm) if limit is None else (limit / norm).clamp(max=1.0)
    factor = torch.where(norm.isfinite(), factor, torch.nan)
    corrections = [1 / (1 - torch.pow(beta, step.reshape(1))) for beta in betas]
    return torch.cat([factor, *corrections]).float()


def update(
    weight: Tensor,
    rest: Tensor | None,
    moments: tuple[Tensor, Tensor],
    grad: Tensor,
    controls: Tensor,
    settings: AdamW,
    weight_decay: float,
) -> None:
    """Update a weight and its moments in place, or leave them as they are where `controls` (see `control`) says so.

    All are contiguous and of one size; `rest` i16 with a bfloat16 weight, None with a float32 one. `moments` float32.
    """
    if not weight.is_cuda:
        update_plain(weight, rest, moments, grad, controls, settings, weight_decay)
        return
    count, block = weight.numel(), 2048
    if not count:
        return
    triton_module("adamw_triton").adamw_kernel[((count + block - 1) // block,)](
        weight,
        weight if rest is None else rest,
        *moments,
        grad,
        controls,
        count,
        settings.lr,
        *settings.betas,
        settings.eps,
        weight_decay,
        SPLIT=rest is not None,
        BLOCK=block,
        num_warps=8,
    )


def update_plain(
    weight: Tensor,
    rest: Tensor | None,
    moments: tuple[Tensor, Tensor],
    grad: Tensor,
    controls: Tensor,
    settings: AdamW,
    weight_decay: float,
) -> None:
    """Compute `update` in plain torch; the host waits for `controls`."""
    factor, correct1, correct2 = controls.tolist()
    if math.isnan(factor):
        return
    beta1, beta2 = settings.betas
    first, second = moments
    g = grad.to(first.dtype).view_as(first) * factor
    x = weight.clone() if rest is None else join(weight, rest)
    x.mul_(1 - settings.lr * weight_decay)
    first.lerp_(g, 1 - beta1)
    second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    x.sub_(settings.lr * correct1 * first.view_as(x) / ((second.view_as(x) * correct2).sqrt() + settings.eps))
    if rest is None:
        weight.copy_(x)
        return
    rounded, left = split(x)
    weight.copy_(rounded)
    rest.copy_(left)
