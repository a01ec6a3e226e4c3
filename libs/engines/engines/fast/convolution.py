"""Convolution, silu and unit length on the way from a gated delta net's projection to the operands of its rule.

As operations of one node each, forward and backward: one pass over the tokens in Triton on a GPU, where compiled
plain torch took five. The plain form (`pointwise.conv_silu` and `pointwise.unit`) is the reference, and runs on a CPU.
"""

# ruff: noqa: ARG001 (a fake has the arguments of its operation)
import torch
from torch import Tensor

from engines.fast.pointwise import L2_EPS, conv_silu, conv_silu_grad, l2_normalize, l2_normalize_grad
from engines.fast.triton_kernels import triton_module

_BLOCK = 32
_STEPS = 8


@torch.library.custom_op("engines::conv_heads", mutates_args=())
def conv_heads(x: Tensor, weight: Tensor, position: Tensor, keys: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Convolve x [T, D] in each sequence (weight [D, K]) and activate: q, k [T, keys, head], v [T, rest, head].

    q and k have unit length; `position` i32[T] is a token's place in its sequence.
    """
    values = x.shape[1] // head - 2 * keys
    if not x.is_cuda:
        q, k, v = _cut(conv_silu(x, weight, position), keys, head)
        return l2_normalize(q), l2_normalize(k), v.contiguous()
    tokens, channels = x.shape
    q, k = (x.new_empty(tokens, keys, head) for _ in range(2))
    v = x.new_empty(tokens, values, head)
    triton_module("conv_triton").forward_kernel[(_blocks(tokens), channels // head)](
        x.contiguous(),
        weight.contiguous(),
        position,
        q,
        k,
        v,
        tokens,
        channels,
        L2_EPS,
        KEYS=keys,
        VALUES=values,
        HEAD=head,
        TAPS=weight.shape[1],
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return q, k, v


@conv_heads.register_fake
def _(x: Tensor, weight: Tensor, position: Tensor, keys: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    tokens, values = x.shape[0], x.shape[1] // head - 2 * keys
    shapes = (tokens, keys, head), (tokens, keys, head), (tokens, values, head)
    return x.new_empty(shapes[0]), x.new_empty(shapes[1]), x.new_empty(shapes[2])


@torch.library.custom_op("engines::conv_heads_grad", mutates_args=())
def conv_heads_grad(
    x: Tensor, weight: Tensor, position: Tensor, d_q: Tensor, d_k: Tensor, d_v: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (d x [T, D], d weight [D, K]) of `conv_heads`."""
    keys, head = d_q.shape[1], d_q.shape[2]
    if not x.is_cuda:
        q, k, _ = _cut(conv_silu(x, weight, position), keys, head)
        grads = (l2_normalize_grad(q, d_q), l2_normalize_grad(k, d_k), d_v)
        return conv_silu_grad(x, weight, position, torch.cat([grad.flatten(1) for grad in grads], dim=1))
    (tokens, channels), taps = x.shape, weight.shape[1]
    x, weight = x.contiguous(), weight.contiguous()
    d_y, d_x = torch.empty_like(x), torch.empty_like(x)
    kernels, heads = triton_module("conv_triton"), channels // head
    kernels.activation_grad_kernel[(_blocks(tokens), heads)](
        x,
        weight,
        position,
        d_q.contiguous(),
        d_k.contiguous(),
        d_v.contiguous(),
        d_y,
        tokens,
        channels,
        L2_EPS,
        KEYS=keys,
        VALUES=d_v.shape[1],
        HEAD=head,
        TAPS=taps,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    parts = -(-_blocks(tokens) // _STEPS)
    partial = torch.empty(parts, channels, taps, dtype=torch.float32, device=x.device)
    kernels.conv_grad_kernel[(parts, heads)](
        x,
        weight,
        position,
        d_y,
        d_x,
        partial,
        tokens,
        channels,
        _STEPS,
        HEAD=head,
        TAPS=taps,
        ROWS=1 << (taps - 1).bit_length(),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return d_x, partial.sum(0).to(weight.dtype)


@conv_heads_grad.register_fake
def _(x: Tensor, weight: Tensor, position: Tensor, d_q: Tensor, d_k: Tensor, d_v: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


def _blocks(tokens: int) -> int:
    return -(-tokens // _BLOCK)


def _cut(conved: Tensor, keys: int, head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k [T, keys, head] and v from the convolution's result."""
    heads = conved.view(conved.shape[0], -1, head)
    return heads[:, :keys], heads[:, keys : 2 * keys], heads[:, 2 * keys :]
