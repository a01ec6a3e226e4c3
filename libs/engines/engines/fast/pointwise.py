"""The token-by-token pieces of a decoder layer, each a function with its gradient written out.

They are plain torch, so that a compiler fuses each chain into one kernel; and their gradients are functions too, so
that a layer decides by itself what it keeps and what it computes again. All arithmetic is float32 (float64 for float64
operands), and results have the dtype of the activations. Formulas as in transformers' Qwen3.5 and Qwen3, but for norms
that are rounded there between their two factors.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

L2_EPS = 1e-6


class Norm(NamedTuple):
    """How a model's norms compute."""

    eps: float
    zero_centered: bool = True
    """Whether 1 is added to their weights."""


def to_float32(x: Tensor) -> Tensor:
    """Return x in the dtype of the arithmetic: float64 for float64, else float32."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """Return x [..., D] over its root mean square, times weight [D], or 1 + weight."""
    f = to_float32(x)
    return (f * torch.rsqrt(f.square().mean(-1, keepdim=True) + norm.eps) * _factor(weight, norm)).to(x.dtype)


def rms_norm_grad(x: Tensor, weight: Tensor, norm: Norm, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return (d x [..., D] in the arithmetic's dtype, d weight [D]) of `rms_norm`."""
    f, g = to_float32(x), to_float32(grad)
    scale = torch.rsqrt(f.square().mean(-1, keepdim=True) + norm.eps)
    n = f * scale
    d_n = g * _factor(weight, norm)
    d_x = scale * (d_n - n * (d_n * n).mean(-1, keepdim=True))
    return d_x, (g * n).flatten(0, -2).sum(0).to(weight.dtype)


def _factor(weight: Tensor, norm: Norm) -> Tensor:
    wide = to_float32(weight)
    return 1.0 + wide if norm.zero_centered else wide


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [..., D] over its root mean square, times weight [D] and silu(gate [..., D])."""
    f, z = to_float32(x), to_float32(gate)
    n = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + eps)
    return (n * to_float32(weight) * (z * z.sigmoid())).to(x.dtype)


def gated_norm_grad(x: Tensor, gate: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (d x, d gate, d weight) of `gated_norm`."""
    f, z, g, w = to_float32(x), to_float32(gate), to_float32(grad), to_float32(weight)
    scale = torch.rsqrt(f.square().mean(-1, keepdim=True) + eps)
    n, s = f * scale, z.sigmoid()
    d_n = g * w * (z * s)
    d_x = scale * (d_n - n * (d_n * n).mean(-1, keepdim=True))
    d_z = g * n * w * (s * (1.0 + z * (1.0 - s)))
    return d_x.to(x.dtype), d_z.to(gate.dtype), (g * n * (z * s)).flatten(0, -2).sum(0).to(weight.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up."""
    p = to_float32(gate)
    return (p * p.sigmoid() * to_float32(up)).to(gate.dtype)


def swiglu_grad(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return (d gate, d up) of `swiglu`."""
    p, u, g = to_float32(gate), to_float32(up), to_float32(grad)
    s = p.sigmoid()
    return (g * u * (s * (1.0 + p * (1.0 - s)))).to(gate.dtype), (g * (p * s)).to(up.dtype)


def l2_normalize(x: Tensor) -> Tensor:
    """Return x [..., D] over its length."""
    f = to_float32(x)
    return (f * torch.rsqrt(f.square().sum(-1, keepdim=True) + L2_EPS)).to(x.dtype)


def l2_normalize_grad(x: Tensor, grad: Tensor) -> Tensor:
    """Return d x of `l2_normalize`."""
    f, g = to_float32(x), to_float32(grad)
    scale = torch.rsqrt(f.square().sum(-1, keepdim=True) + L2_EPS)
    n = f * scale
    return (scale * (g - n * (g * n).sum(-1, keepdim=True))).to(x.dtype)


def decay(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Return log decay -exp(a_log) * softplus(a + dt_bias): a [T, Hv], a_log and dt_bias [Hv] -> [T, Hv], float32."""
    return -to_float32(a_log).exp() * softplus(to_float32(a) + to_float32(dt_bias))


def decay_grad(a: Tensor, a_log: Tensor, dt_bias: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (d a, d a_log, d dt_bias) of `decay`."""
    x, rate, g = to_float32(a) + to_float32(dt_bias), -to_float32(a_log).exp(), to_float32(grad)
    d_a = g * rate * x.sigmoid()
    return d_a.to(a.dtype), (g * rate * softplus(x)).sum(0).to(a_log.dtype), d_a.sum(0).to(dt_bias.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R features of each head: x [T, H, D], cos and sin [T, R] with equal halves."""
    half = cos.shape[-1] // 2
    f, c, s = to_float32(x), to_float32(cos)[:, None], to_float32(sin)[:, None]
    left, right, rest = f[..., :half], f[..., half : 2 * half], f[..., 2 * half :]
    low, high = slice(None, half), slice(half, None)
    turned = (left * c[..., low] - right * s[..., low], right * c[..., high] + left * s[..., high], rest)
    return torch.cat(turned, dim=-1).to(x.dtype)


def rotate_grad(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return d x of `rotate`: the rotation back, with the sine of each half's partner."""
    half = cos.shape[-1] // 2
    g, c, s = to_float32(grad), to_float32(cos)[:, None], to_float32(sin)[:, None]
    left, right, rest = g[..., :half], g[..., half : 2 * half], g[..., 2 * half :]
    low, high = slice(None, half), slice(half, None)
    turned = (left * c[..., low] + right * s[..., high], right * c[..., high] - left * s[..., low], rest)
    return torch.cat(turned, dim=-1).to(grad.dtype)


def conv_silu(x: Tensor, weight: Tensor, position: Tensor) -> Tensor:
    """Convolve inside each sequence, depthwise and causal, then apply silu: x [T, D], weight [D, K] -> [T, D].

    `position` [T]: a token's place in its sequence, from 0; a tap that would reach over its start is left out.
    """
    y = _conv(x, weight, position)
    return (y * y.sigmoid()).to(x.dtype)


def conv_silu_grad(x: Tensor, weight: Tensor, position: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return (d x [T, D], d weight [D, K]) of `conv_silu`."""
    tokens, taps = x.shape[0], weight.shape[1]
    y = _conv(x, weight, position)
    s = y.sigmoid()
    d_y = (to_float32(grad) * (s * (1.0 + y * (1.0 - s)))).to(x.dtype)
    f, w, g = to_float32(x), to_float32(weight), to_float32(d_y)
    d_x, d_w = g * w[:, taps - 1], [(g * f).sum(0)]
    for back in range(1, taps):
        seen = torch.where((position >= back)[:, None], g, 0.0)
        d_x = d_x + pad(seen, (0, 0, 0, back))[back:] * w[:, taps - 1 - back]
        d_w.insert(0, (seen * pad(f, (0, 0, back, 0))[:tokens]).sum(0))
    return d_x.to(x.dtype), torch.stack(d_w, dim=1).to(weight.dtype)


def _conv(x: Tensor, weight: Tensor, position: Tensor) -> Tensor:
    """Return the convolution before silu, in the arithmetic's dtype."""
    tokens, taps = x.shape[0], weight.shape[1]
    f, w = to_float32(x), to_float32(weight)
    y = f * w[:, taps - 1]
    for back in range(1, taps):
        past = pad(f, (0, 0, back, 0))[:tokens]
        y = y + torch.where((position >= back)[:, None], past, 0.0) * w[:, taps - 1 - back]
    return y
