"""Operations of a layer by torch_npu's fused operators, each with the plain formula that it stands for.

No hardware was at hand: they were held to the plain formulas through a stand-in that computes on the CPU, which tells
whether names, arguments and meaning are right, and nothing of speed or of an NPU's own rounding.
"""

from typing import Any

import torch
from torch import Tensor, nn

from engines.devices.npu import torch_npu

VERSIONS = ">=2.13,<2.14"
"""Versions of torch_npu: names and signatures were checked against a wheel (`engines/fake_npu/surface.json`)."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dimension of x[..., d] by its root mean square, times weight f[d]; in x's dtype."""
    normed: Tensor = torch_npu().npu_rms_norm(x, weight.to(x.dtype), epsilon=eps)[0]
    return normed


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return `rms_norm` of x times silu(gate), which is computed in float32; the result has x's dtype."""
    return (rms_norm(x, weight, eps) * nn.functional.silu(gate.float())).to(x.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up, of the same shape [..., d]."""
    return swiglu_halves(torch.cat([gate, up], -1))


def swiglu_halves(joined: Tensor) -> Tensor:
    """Return `swiglu` of the two halves of joined [..., 2 d]: [..., d]."""
    product: Tensor = torch_npu().npu_swiglu(joined, dim=-1)
    return product


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate the first cos.shape[-1] features of q and k [b, h, s, d] by half-rotation; cos and sin are [b, s, r]."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return _turned(q, cos, sin), _turned(k, cos, sin)


def rotary_of_tokens(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R features of x [T, heads, d] by half-rotation; cos and sin are [T, R]."""
    return _turned(x.unsqueeze(0), cos[None, :, None], sin[None, :, None]).squeeze(0)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turns, stays = x.split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], -1)
    turned: Tensor = torch_npu().npu_rotary_mul(turns.contiguous(), cos, sin)
    return torch.cat([turned, stays], -1) if stays.shape[-1] else turned


def grouped_matmul(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return rows x [m, k] times the matrix of their group, [m, n]: weight [groups, k, n], counts i64[groups] rows a
    group."""
    product: Tensor = _GroupedMatmul.apply(x, weight, counts)
    return product


class _GroupedMatmul(torch.autograd.Function):
    """npu_grouped_matmul with a derivative: the two products of its gradient are grouped ones again."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        context.save_for_backward(x, weight, counts)
        return _grouped(x, weight, counts, 0)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, counts = context.saved_tensors
        (above,) = gradients
        return _grouped(above, weight.transpose(1, 2), counts, 0), _grouped(x.t(), above, counts, 2), None


def _grouped(x: Tensor, weight: Tensor, counts: Tensor, group_type: int) -> Tensor:
    """Run one grouped product: `group_type` 0 splits rows, 2 the summed dimension. One result (split_item 3), groups by
    size (list type 1)."""
    options = {"group_list": counts, "split_item": 3, "group_type": group_type, "group_list_type": 1}
    result: Tensor = torch_npu().npu_grouped_matmul([x], [weight], **options)[0]
    return result
