"""The packed forward pass of gated delta net layers: token-major, one row of many sequences."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from seqpack.adapters.context import PackedContext

PackedForward = Callable[[Any, Tensor, PackedContext], Tensor] | Callable[[Any, Tensor, PackedContext, Any], Any]
"""Hidden states [T, H] of a layer to [T, H]; or, given the layer's other arguments by name, [1, T, H] to what it
returns."""


def split_projections(layer: Any, x: Tensor, context: PackedContext) -> Tensor:
    """Run Qwen3.5's layer on x [T, H]: one projection for q, k, v; one each for the gate and the two head scalars."""
    mixed = layer.in_proj_qkv(x)
    return _mix(layer, mixed, layer.in_proj_z(x), layer.in_proj_b(x), layer.in_proj_a(x), context)


def joint_projections(layer: Any, x: Tensor, context: PackedContext) -> Tensor:
    """Run Qwen3-Next's layer on x [T, H]: two projections whose outputs are interleaved by key head."""
    tokens = x.shape[0]
    joint, scalars = layer.in_proj_qkvz(x).unsqueeze(0), layer.in_proj_ba(x).unsqueeze(0)
    q, k, v, z, b, a = layer.fix_query_key_value_ordering(joint, scalars)
    mixed = torch.cat([part.reshape(tokens, -1) for part in (q, k, v)], dim=-1)
    return _mix(layer, mixed, z.reshape(tokens, -1), b.squeeze(0), a.squeeze(0), context)


def _mix(layer: Any, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor, context: PackedContext) -> Tensor:
    """Run what both families share: convolution, gated delta rule, gated norm and output projection."""
    tokens = mixed.shape[0]
    conv = layer.conv1d
    mixed = context.ops.causal_conv1d(mixed, conv.weight.squeeze(1), conv.bias, context, layer.activation)
    q, k, v = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=-1)
    q, k = (part.reshape(tokens, -1, layer.head_k_dim) for part in (q, k))
    v = v.reshape(tokens, -1, layer.head_v_dim)
    decay = -layer.A_log.float().exp() * functional.softplus(a.float() + layer.dt_bias)
    out = context.ops.gated_delta_rule(q, k, v, decay, b.sigmoid(), context)
    out = layer.norm(out.reshape(-1, layer.head_v_dim), z.reshape(-1, layer.head_v_dim))
    result: Tensor = layer.out_proj(out.reshape(tokens, -1))
    return result
