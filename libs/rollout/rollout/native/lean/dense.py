"""Reads the weights of dense models with plain softmax attention: Qwen3, Qwen2, Llama, Mistral.

They differ in biases, which the layers themselves have or have not, and in Qwen3's norms of queries and keys.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rollout.native.lean.model_weights import (
    AttentionWeights,
    LayerWeights,
    ModelWeights,
    Projection,
    eps_of,
    joinable,
    pair,
    wide,
)
from rollout.native.lean.rotary import head_dim_of, pair_order, reordered, reordered_pairs


def read_dense(model: nn.Module) -> ModelWeights:
    """Read the present weights of a causal language model of these families."""
    text: Any = model.model
    head: Any = model.lm_head
    order = pair_order(text.rotary_emb, head_dim_of(text.config), text.embed_tokens.weight)
    eps = eps_of(text.norm.variance_epsilon, text.norm.weight)
    return ModelWeights(
        embed=text.embed_tokens.weight.detach(),
        layers=tuple(_layer(index, layer, eps, order) for index, layer in enumerate(text.layers)),
        eps=eps,
        head=Projection.of([pair(head)], _factor(text.norm)),
    )


def _layer(index: int, layer: Any, eps: Tensor, order: Tensor | None) -> LayerWeights:
    return LayerWeights(
        index=index,
        mixer=_attention(layer.self_attn, _factor(layer.input_layernorm), eps, order),
        up_gate=Projection.of(
            [pair(layer.mlp.up_proj), pair(layer.mlp.gate_proj)], _factor(layer.post_attention_layernorm)
        ),
        down=Projection.of([pair(layer.mlp.down_proj)]),
    )


def _attention(net: Any, before: Tensor, eps: Tensor, order: Tensor | None) -> AttentionWeights:
    heads, kv_heads = (p.out_features // net.head_dim for p in (net.q_proj, net.k_proj))
    norm: Tensor | None = None
    if hasattr(net, "q_norm"):
        norm = torch.cat([_factor(net.q_norm).expand(heads, -1), _factor(net.k_norm).expand(kv_heads, -1)])
        norm = reordered(norm.flatten(), order, net.head_dim).view_as(norm)
        eps = eps_of(net.q_norm.variance_epsilon, net.q_norm.weight)
    pairs = [pair(p) for p in (net.q_proj, net.k_proj, net.v_proj)]
    if joinable(pairs):
        pairs = [*reordered_pairs(pairs[:2], order, net.head_dim), pairs[2]]
    return AttentionWeights(
        project=Projection.of(pairs, before),
        norm=norm,
        eps=eps,
        out=Projection.of([pair(net.o_proj)]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=net.head_dim,
        scale=net.scaling,
        gated=False,
        order=order,
    )


def _factor(norm: Any) -> Tensor:
    return wide(norm.weight.detach())
