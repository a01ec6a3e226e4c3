"""A head for multi-token prediction in plain torch: one sequence, every product written out, no code of the engines."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, silu


def mtp_logits(tensors: Mapping[str, Tensor], config: Any, ids: Tensor, hidden: Tensor) -> Tensor:
    """Return logits [T - 2, V] of tokens 2 .. T - 1 of one sequence `ids` i64[T] from last hidden states [T, H].

    `tensors`: those of a checkpoint by their names there, of Qwen3.5 with or without experts.
    """
    text, eps = config.get_text_config(), config.get_text_config().rms_norm_eps
    own = {name.removeprefix("mtp."): value for name, value in tensors.items() if name.startswith("mtp.")}
    embed = tensors["model.embed_tokens.weight"].detach()
    head = embed if text.tie_word_embeddings else tensors["lm_head.weight"].detach()
    following, states = embed[ids[1:]], hidden.detach()[:-1]
    x = torch.cat([_norm(following, own["pre_fc_norm_embedding.weight"], eps),
                   _norm(states, own["pre_fc_norm_hidden.weight"], eps)], 1)  # fmt: skip
    x = linear(x, own["fc.weight"])
    layer = {name.removeprefix("layers.0."): value for name, value in own.items() if name.startswith("layers.0.")}
    x = x + _attention(layer, text, _norm(x, layer["input_layernorm.weight"], eps))
    n = _norm(x, layer["post_attention_layernorm.weight"], eps)
    x = x + (_experts(layer, text, n) if "mlp.gate.weight" in layer else _gated("mlp.", layer, n))
    return linear(_norm(x, own["norm.weight"], eps), head)[:-1]


def mtp_loss(tensors: Mapping[str, Tensor], config: Any, ids: Tensor, hidden: Tensor, mask: Tensor) -> tuple[Any, Any]:
    """Return the summed cross entropy of the tokens of one sequence under `mask`, and how many are the likeliest."""
    if len(ids) < 3:
        return hidden.new_zeros(()), 0
    logits, wanted = mtp_logits(tensors, config, ids, hidden), mask[2:]
    losses = cross_entropy(logits, ids[2:], reduction="none")
    return (losses * wanted).sum(), int(((logits.argmax(1) == ids[2:]) & wanted).sum())


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (1 + weight)


def _attention(layer: Mapping[str, Tensor], text: Any, x: Tensor) -> Tensor:
    length, heads, dim = len(x), text.num_attention_heads, text.head_dim
    part = {name: linear(x, layer[f"self_attn.{name}_proj.weight"]) for name in "qkv"}
    q, gate = part["q"].view(length, heads, 2, dim).unbind(2)
    k, v = (part[name].view(length, -1, dim) for name in "kv")
    q = _rotated(_norm(q, layer["self_attn.q_norm.weight"], text.rms_norm_eps), text)
    k = _rotated(_norm(k, layer["self_attn.k_norm.weight"], text.rms_norm_eps), text)
    each = heads // k.shape[1]
    k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * dim**-0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    mixed = torch.einsum("hij,jhd->ihd", scores.softmax(-1), v) * gate.sigmoid()
    return linear(mixed.reshape(length, -1), layer["self_attn.o_proj.weight"])


def _rotated(x: Tensor, text: Any) -> Tensor:
    rope = text.rope_parameters
    size = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
    rates = rope["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
    angles = (torch.arange(len(x)).double()[:, None] * rates.double())[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, other, rest = x[..., : size // 2], x[..., size // 2 : size], x[..., size:]
    return torch.cat([one * cos - other * sin, other * cos + one * sin, rest], -1)


def _gated(before: str, layer: Mapping[str, Tensor], x: Tensor) -> Tensor:
    gate, up, down = (layer[f"{before}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def _experts(layer: Mapping[str, Tensor], text: Any, x: Tensor) -> Tensor:
    shares, chosen = linear(x, layer["mlp.gate.weight"]).softmax(-1).topk(text.num_experts_per_tok)
    shares = shares / shares.sum(-1, keepdim=True)
    rows = []
    for token, weights, experts in zip(x, shares, chosen, strict=True):
        row = torch.zeros_like(token)
        for weight, expert in zip(weights, experts.tolist(), strict=True):
            gate, up = (layer["mlp.experts.gate_up_proj"][expert] @ token).chunk(2)
            row = row + weight * (layer["mlp.experts.down_proj"][expert] @ (silu(gate) * up))
        rows.append(row)
    shared = linear(x, layer["mlp.shared_expert_gate.weight"]).sigmoid() * _gated("mlp.shared_expert.", layer, x)
    return torch.stack(rows) + shared
