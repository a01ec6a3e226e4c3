"""The two halves of a decoder layer (mix tokens, then the MLP) as functions of tensors, with explicit backward passes.

Each is residual: x + f(norm(x)). A forward function returns the result and what its backward pass needs besides x and
the weights: the results of matrix products, of the delta rule and of attention. Everything else (norms, convolution,
gates, rotation, activations) is computed again in the backward pass, where it is fused into kernels that read those
results anyway. Matrix products have the activations' dtype; the several gradients of one tensor are added in float32.

Shapes: T tokens, H hidden, x [T, H]; weights as in an `nn.Linear`, [out, in], or with an adapter beside them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from engines.fast.adapted_linear import Weight, base, input_grad, project, weight_grad
from engines.fast.attention import causal_attention, causal_attention_grad
from engines.fast.convolution import conv_heads, conv_heads_grad
from engines.fast.delta_rule import delta_rule, delta_rule_grad
from engines.fast.pointwise import (
    Norm,
    decay,
    decay_grad,
    gated_norm,
    gated_norm_grad,
    rms_norm,
    rms_norm_grad,
    rotate,
    rotate_grad,
    swiglu,
    swiglu_grad,
    to_float32,
)

Tensors = tuple[Tensor, ...]


class Where(NamedTuple):
    """The packed tokens: see `engines.fast.sequence_bounds.Sequences`; cos and sin [T, R] of their rotation."""

    cu_seqlens: Tensor
    boundaries: Tensor
    position: Tensor
    longest: Tensor
    cos: Tensor
    sin: Tensor


class MLPWeights(NamedTuple):
    """The weights of the gated MLP and the norm before it."""

    norm: Tensor
    gate: Weight
    up: Weight
    down: Weight


class SharedExpertWeights(NamedTuple):
    """The weights of a gated MLP that every token goes to, and of the one feature that its result is switched by."""

    gate: Weight
    up: Weight
    down: Weight
    switch: Weight


class DeltaNetWeights(NamedTuple):
    """The weights of a gated delta net layer and the norm before it; `conv` [D, K]."""

    norm: Tensor
    qkv: Weight
    z: Weight
    b: Weight
    a: Weight
    conv: Tensor
    a_log: Tensor
    dt_bias: Tensor
    gated_norm: Tensor
    out: Weight


class AttentionWeights(NamedTuple):
    """The weights of an attention layer and the norm before it; q of gated attention has a gate beside each head."""

    norm: Tensor
    q: Weight
    k: Weight
    v: Weight
    q_norm: Tensor
    k_norm: Tensor
    out: Weight


def mlp(x: Tensor, w: MLPWeights, where: Where, norm: Norm) -> tuple[Tensor, Tensors]:
    """Return x + down(silu(gate(n)) * up(n)) with n = norm(x); kept: gate and up."""
    del where  # this half mixes no tokens
    n = rms_norm(x, w.norm, norm)
    p, u = project(n, w.gate), project(n, w.up)
    return x + project(swiglu(p, u), w.down), (p, u)


def mlp_grad(
    grad: Tensor, x: Tensor, w: MLPWeights, kept: Tensors, where: Where, norm: Norm
) -> tuple[Tensor, MLPWeights]:
    """Return (d x, d weights) of `mlp`."""
    del where
    p, u = kept
    d_down = weight_grad(grad, swiglu(p, u), w.down)
    d_p, d_u = swiglu_grad(p, u, input_grad(grad, w.down))
    n = rms_norm(x, w.norm, norm)
    d_gate, d_up = weight_grad(d_p, n, w.gate), weight_grad(d_u, n, w.up)
    d_x, d_norm = rms_norm_grad(
        x, w.norm, norm, to_float32(input_grad(d_p, w.gate)) + to_float32(input_grad(d_u, w.up))
    )
    return (d_x + to_float32(grad)).to(x.dtype), MLPWeights(d_norm, d_gate, d_up, d_down)


def shared_expert(n: Tensor, w: SharedExpertWeights, where: Where, norm: Norm) -> tuple[Tensor, Tensors]:
    """Return down(silu(gate(n)) * up(n) * sigmoid(switch(n))); kept: gate, up and switch. Not residual: n is normed."""
    del where, norm
    p, u, z = project(n, w.gate), project(n, w.up), project(n, w.switch)
    return project(_switched(p, u, z), w.down), (p, u, z)


def shared_expert_grad(
    grad: Tensor, n: Tensor, w: SharedExpertWeights, kept: Tensors, where: Where, norm: Norm
) -> tuple[Tensor, SharedExpertWeights]:
    """Return (d n, d weights) of `shared_expert`."""
    del where, norm
    p, u, z = kept
    s, d_a = to_float32(z).sigmoid(), to_float32(input_grad(grad, w.down))
    d_s = (d_a * swiglu(to_float32(p), to_float32(u))).sum(-1, keepdim=True)
    d_z = (d_s * s * (1.0 - s)).to(z.dtype)
    d_p, d_u = swiglu_grad(p, u, d_a * s)
    d_n = to_float32(input_grad(d_p, w.gate)) + to_float32(input_grad(d_u, w.up))
    d_n = d_n + to_float32(input_grad(d_z, w.switch))
    d_down = weight_grad(grad, _switched(p, u, z), w.down)
    d_weights = SharedExpertWeights(
        weight_grad(d_p, n, w.gate), weight_grad(d_u, n, w.up), d_down, weight_grad(d_z, n, w.switch)
    )
    return d_n.to(n.dtype), d_weights


def _switched(p: Tensor, u: Tensor, z: Tensor) -> Tensor:
    return (swiglu(to_float32(p), to_float32(u)) * to_float32(z).sigmoid()).to(p.dtype)


def delta_net(x: Tensor, w: DeltaNetWeights, where: Where, norm: Norm) -> tuple[Tensor, Tensors]:
    """Return x + the gated delta net layer; kept: its projections and the rule's results."""
    n = rms_norm(x, w.norm, norm)
    mixed, z, b, a = project(n, w.qkv), project(n, w.z), project(n, w.b), project(n, w.a)
    q, k, v, g, beta = _rule_operands(mixed, b, a, w, where)
    o, cumulative, inverses = delta_rule(q, k, v, g, beta, where.boundaries)
    y = gated_norm(o, z.view_as(o), w.gated_norm, norm.eps).flatten(1)
    return x + project(y, w.out), (mixed, z, b, a, o, cumulative, inverses)


def delta_net_grad(
    grad: Tensor, x: Tensor, w: DeltaNetWeights, kept: Tensors, where: Where, norm: Norm
) -> tuple[Tensor, DeltaNetWeights]:
    """Return (d x, d weights) of `delta_net`."""
    mixed, z, b, a, o, cumulative, inverses = kept
    z = z.view_as(o)
    d_out = weight_grad(grad, gated_norm(o, z, w.gated_norm, norm.eps).flatten(1), w.out)
    d_o, d_z, d_gated_norm = gated_norm_grad(o, z, w.gated_norm, norm.eps, input_grad(grad, w.out).view_as(o))
    q, k, v, g, beta = _rule_operands(mixed, b, a, w, where)
    d_q, d_k, d_v, d_g, d_beta = delta_rule_grad(q, k, v, g, cumulative, beta, inverses, where.boundaries, d_o)
    d_a, d_a_log, d_dt_bias = decay_grad(a, w.a_log, w.dt_bias, d_g)
    s = to_float32(b).sigmoid()
    d_b = (to_float32(d_beta) * s * (1.0 - s)).to(b.dtype)
    d_mixed, d_conv = conv_heads_grad(mixed, w.conv, where.position, d_q, d_k, d_v)
    d_z = d_z.flatten(1)
    n = rms_norm(x, w.norm, norm)
    d_n = to_float32(input_grad(d_mixed, w.qkv)) + to_float32(input_grad(d_z, w.z))
    d_n = d_n + to_float32(input_grad(d_b, w.b)) + to_float32(input_grad(d_a, w.a))
    d_x, d_norm = rms_norm_grad(x, w.norm, norm, d_n)
    linear = (
        weight_grad(d_mixed, n, w.qkv),
        weight_grad(d_z, n, w.z),
        weight_grad(d_b, n, w.b),
        weight_grad(d_a, n, w.a),
    )
    d_weights = DeltaNetWeights(d_norm, *linear, d_conv, d_a_log, d_dt_bias, d_gated_norm, d_out)
    return (d_x + to_float32(grad)).to(x.dtype), d_weights


def attention(x: Tensor, w: AttentionWeights, where: Where, norm: Norm) -> tuple[Tensor, Tensors]:
    """Return x + the attention layer; kept: its projections and attention's results."""
    n = rms_norm(x, w.norm, norm)
    qg, k, v = project(n, w.q), project(n, w.k), project(n, w.v)
    q, gate, k_turned, v_heads = _attention_operands(qg, k, v, w, where, norm)
    o, normalizers = causal_attention(q, k_turned, v_heads, where.cu_seqlens, where.longest)
    y = o if gate is None else (to_float32(o) * to_float32(gate).sigmoid()).to(x.dtype)
    return x + project(y.flatten(1), w.out), (qg, k, v, o, normalizers)


def attention_grad(
    grad: Tensor, x: Tensor, w: AttentionWeights, kept: Tensors, where: Where, norm: Norm
) -> tuple[Tensor, AttentionWeights]:
    """Return (d x, d weights) of `attention`."""
    qg, k, v, o, normalizers = kept
    q, gate, k_turned, v_heads = _attention_operands(qg, k, v, w, where, norm)
    y, d_o, d_gate = o, input_grad(grad, w.out).view_as(o), None
    if gate is not None:
        s, f, d_y = to_float32(gate).sigmoid(), to_float32(o), to_float32(d_o)
        y, d_o, d_gate = (f * s).to(x.dtype), (d_y * s).to(x.dtype), (d_y * f * s * (1.0 - s)).to(x.dtype)
    d_out = weight_grad(grad, y.flatten(1), w.out)
    d_q, d_k, d_v = causal_attention_grad(q, k_turned, v_heads, o, normalizers, where.cu_seqlens, where.longest, d_o)
    head = w.q_norm.shape[0]
    q_heads, k_heads = qg.view(qg.shape[0], q.shape[1], -1)[..., :head], k.view(k.shape[0], -1, head)
    d_q, d_q_norm = rms_norm_grad(q_heads, w.q_norm, norm, rotate_grad(d_q, where.cos, where.sin))
    d_k, d_k_norm = rms_norm_grad(k_heads, w.k_norm, norm, rotate_grad(d_k, where.cos, where.sin))
    d_qg = d_q.to(x.dtype)
    d_qg = (d_qg if d_gate is None else torch.cat([d_qg, d_gate], dim=-1)).flatten(1)
    d_k, d_v = d_k.to(x.dtype).flatten(1), d_v.flatten(1)
    n = rms_norm(x, w.norm, norm)
    d_n = to_float32(input_grad(d_qg, w.q)) + to_float32(input_grad(d_k, w.k)) + to_float32(input_grad(d_v, w.v))
    d_x, d_norm = rms_norm_grad(x, w.norm, norm, d_n)
    projections = (weight_grad(d_qg, n, w.q), weight_grad(d_k, n, w.k), weight_grad(d_v, n, w.v))
    d_weights = AttentionWeights(d_norm, *projections, d_q_norm, d_k_norm, d_out)
    return (d_x + to_float32(grad)).to(x.dtype), d_weights


def _rule_operands(mixed: Tensor, b: Tensor, a: Tensor, w: DeltaNetWeights, where: Where) -> Tensors:
    """Return q, k, v, log decay and beta of the delta rule from the projections; keys and values have one head size."""
    head = w.gated_norm.shape[0]
    keys = (mixed.shape[1] - base(w.out).shape[1]) // (2 * head)
    q, k, v = conv_heads(mixed, w.conv, where.position, keys, head)
    beta = to_float32(b).sigmoid().to(b.dtype)
    return q, k, v, decay(a, w.a_log, w.dt_bias), beta


def _attention_operands(
    qg: Tensor, k: Tensor, v: Tensor, w: AttentionWeights, where: Where, norm: Norm
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Return q [T, Hq, D], its gate if it has one, k and v [T, Hkv, D], normalised and rotated."""
    tokens, head, gate = qg.shape[0], w.q_norm.shape[0], None
    q = qg.view(tokens, base(w.out).shape[1] // head, -1)
    if q.shape[-1] > head:
        q, gate = q.chunk(2, dim=-1)
    q = rotate(rms_norm(q, w.q_norm, norm), where.cos, where.sin)
    k = rotate(rms_norm(k.view(tokens, -1, head), w.k_norm, norm), where.cos, where.sin)
    return q, gate, k, v.view(tokens, -1, head)
