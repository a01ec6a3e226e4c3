"""Reads the weights of Qwen3.5: gated delta nets and gated attention, norms with a factor of 1 + weight."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from rollout.native.decoders.media import text_of
from rollout.native.lean.model_weights import (
    AttentionWeights,
    DeltaWeights,
    LayerWeights,
    ModelWeights,
    Projection,
    eps_of,
    joinable,
    pair,
    wide,
)
from rollout.native.lean.rotary import head_dim_of, pair_order, reordered, reordered_pairs


def read_qwen3_5(model: nn.Module) -> ModelWeights:
    """Read the present weights of a module of exact class Qwen3_5ForCausalLM, or of one with a tower: its text part."""
    text = text_of(model)
    head: Any = model.lm_head
    order = pair_order(text.rotary_emb, head_dim_of(text.config), text.embed_tokens.weight)
    layers: list[LayerWeights] = []
    counts = {"linear_attention": 0, "full_attention": 0}
    for layer in text.layers:
        before, after = _factor(layer.input_layernorm), _factor(layer.post_attention_layernorm)
        mixer = (
            _delta(layer.linear_attn, before)
            if layer.block_type == "linear_attention"
            else _attention(layer.self_attn, before, order)
        )
        layers.append(
            LayerWeights(
                index=counts[layer.block_type],
                mixer=mixer,
                up_gate=Projection.of([pair(layer.mlp.up_proj), pair(layer.mlp.gate_proj)], after),
                down=Projection.of([pair(layer.mlp.down_proj)]),
            )
        )
        counts[layer.block_type] += 1
    return ModelWeights(
        embed=text.embed_tokens.weight.detach(),
        layers=tuple(layers),
        eps=eps_of(text.norm.eps, text.norm.weight),
        head=Projection.of([pair(head)], _factor(text.norm)),
    )


def _factor(norm: qwen.Qwen3_5RMSNorm) -> Tensor:
    return 1 + wide(norm.weight.detach())


def _delta(net: qwen.Qwen3_5GatedDeltaNet, before: Tensor) -> DeltaWeights:
    out, bias = pair(net.out_proj)
    return DeltaWeights(
        project=Projection.of(
            [pair(p) for p in (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)], before
        ),
        conv=net.conv1d.weight.detach().squeeze(1).t().contiguous().t(),  # a step multiplies whole rows of taps
        decay=-wide(net.A_log.detach()).exp(),
        dt_bias=net.dt_bias.detach(),
        out=Projection.of([(out, bias)], net.norm.weight.detach().repeat(net.num_v_heads)),
        eps=eps_of(net.norm.variance_epsilon, out),
        key_heads=net.num_k_heads,
        value_heads=net.num_v_heads,
        key_dim=net.head_k_dim,
        value_dim=net.head_v_dim,
    )


def _attention(net: qwen.Qwen3_5Attention, before: Tensor, order: Tensor | None) -> AttentionWeights:
    heads = net.q_proj.out_features // (2 * net.head_dim)
    kv_heads = net.k_proj.out_features // net.head_dim
    pairs = [pair(p) for p in (net.q_proj, net.k_proj, net.v_proj)]
    project = Projection.of(pairs, before, join=False)
    if joinable(pairs):
        (q, gate), (q_bias, gate_bias) = (_halves(x, heads, net.head_dim) for x in pairs[0])
        both = reordered_pairs([(q, q_bias), pairs[1]], order, net.head_dim)
        project = Projection.of([*both, pairs[2], (gate, gate_bias)], before)
    norm = torch.cat([_factor(net.q_norm).expand(heads, -1), _factor(net.k_norm).expand(kv_heads, -1)])
    return AttentionWeights(
        project=project,
        norm=reordered(norm.flatten(), order, net.head_dim).view_as(norm),
        eps=eps_of(net.q_norm.eps, net.q_norm.weight),
        out=Projection.of([pair(net.o_proj)]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=net.head_dim,
        scale=net.scaling,
        gated=True,
        order=order,
    )


def _halves(x: Tensor | None, heads: int, dim: int) -> tuple[Any, Any]:
    """Return the rows of q_proj for the queries, and those for the gate; they alternate head by head."""
    if x is None:
        return None, None
    parts = x.unflatten(0, (heads, 2, dim))
    return parts[:, 0].flatten(0, 1), parts[:, 1].flatten(0, 1)
