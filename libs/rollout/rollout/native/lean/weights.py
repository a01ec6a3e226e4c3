"""What the lean pass reads of a Qwen3.5 module: its own parameters, and small tensors derived from them.

Large matrices are the module's own tensors. Projections of one input whose matrices are small together are joined into
one, transposed, with the factors of the norm before them multiplied in: there a step's time is the number of calls, not
of multiplications. Derived tensors are copies, so `read_weights` is called again when the module's weights have changed
(`fingerprint`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

JOIN_ELEMENTS = 1 << 22
"""Matrices of one input are joined where they have at most so many elements together."""


@dataclass(frozen=True)
class Projection:
    """One input [T, H], several outputs: by one joined matrix [H, sum of sizes], or by matrices [size, H] of their own.

    `factor` [H] multiplies the input first; None where it is multiplied into the matrix. `shift` is added to the joined
    output.
    """

    sizes: tuple[int, ...]
    joined: Tensor | None
    shift: Tensor | None
    parts: tuple[tuple[Tensor, Tensor | None], ...]
    factor: Tensor | None

    @classmethod
    def of(
        cls, parts: Sequence[tuple[Tensor, Tensor | None]], factor: Tensor | None = None, join: bool = True
    ) -> "Projection":
        """Join the (weight, bias) pairs where they are small and `join` allows it."""
        sizes = tuple(w.shape[0] for w, _ in parts)
        if not join or sum(w.numel() for w, _ in parts) > JOIN_ELEMENTS:
            return cls(sizes, None, None, tuple(parts), factor)
        whole, shift = torch.cat([w for w, _ in parts]), None
        if any(b is not None for _, b in parts):
            shift = torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in parts])
        if factor is not None and whole.dtype in (torch.float32, torch.float64):  # narrow types would round twice
            whole, factor = whole * factor, None
        return cls(sizes, whole.t().contiguous(), shift, (), factor)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """The outputs of x [T, H], each [T, size]."""
        if self.joined is None:
            x = self._scaled(x)
            return [linear(x, w, b) for w, b in self.parts]
        y, outputs, start = self.whole(x), [], 0
        for size in self.sizes:  # views one by one are cheaper than a split
            outputs.append(y.narrow(-1, start, size))
            start += size
        return outputs

    def whole(self, x: Tensor) -> Tensor:
        """The joined output [T, sum of sizes]."""
        assert self.joined is not None
        x = self._scaled(x)
        return x @ self.joined if self.shift is None else torch.addmm(self.shift, x, self.joined)

    def added_to(self, h: Tensor, x: Tensor) -> Tensor:
        """h + the one output of x."""
        if self.joined is None or self.shift is not None:
            return h + self(x)[0]
        return torch.addmm(h, self._scaled(x), self.joined)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.factor is None else (wide(x) * self.factor).to(x.dtype)


@dataclass(frozen=True)
class DeltaWeights:
    """A gated delta net. `project` gives qkv, z, b, a. `fade` is -exp(A_log), [Hv]; `conv` [D, K]."""

    project: Projection
    conv: Tensor
    fade: Tensor
    dt_bias: Tensor
    out: Projection
    eps: Tensor
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class AttentionWeights:
    """Gated softmax attention. `norm` [Hq + Hkv, D]: the factors of the norms of queries and keys.

    `project` gives q, k, v and gate where it is joined; else q with gate (head by head), k and v.
    """

    project: Projection
    norm: Tensor
    eps: Tensor
    out: Projection
    heads: int
    kv_heads: int
    head_dim: int
    scale: float

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [T, Hq + Hkv, D], values [T, Hkv, D], gate [T, Hq * D]."""
        if self.project.joined is None:
            q_gate, k, v = self.project(x)
            q, gate = q_gate.unflatten(-1, (self.heads, 2 * self.head_dim)).chunk(2, dim=-1)
            both = torch.cat([q, k.unflatten(-1, (self.kv_heads, self.head_dim))], dim=1)
            return both, v.unflatten(-1, (self.kv_heads, self.head_dim)), gate.flatten(1)
        y, count = self.project.whole(x), self.heads + self.kv_heads
        heads = y.view(y.shape[0], -1, self.head_dim)  # the last Hq of them are the gate's
        size = self.heads * self.head_dim
        gate = y.narrow(1, y.shape[1] - size, size)
        return heads.narrow(1, 0, count), heads.narrow(1, count, self.kv_heads), gate


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; `index` counts the layers of its own kind. `up_gate` gives up and gate."""

    index: int
    mixer: DeltaWeights | AttentionWeights
    up_gate: Projection
    down: Projection


@dataclass(frozen=True)
class ModelWeights:
    """The whole model. The norms' factors (1 + weight) stand in the projections behind them; `eps` [1] is theirs."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    eps: Tensor
    head: Projection

    @property
    def attention(self) -> list[AttentionWeights]:
        """The attention layers in order."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionWeights)]

    @property
    def delta(self) -> list[DeltaWeights]:
        """The delta nets in order."""
        return [layer.mixer for layer in self.layers if isinstance(layer.mixer, DeltaWeights)]


def refusal(model: nn.Module) -> str | None:
    """Why the lean pass cannot stand for this module's own forward, or None where it can.

    It reads weights, so it must be sure that nothing else acts: exact classes (an adapter replaces them), no hooks.
    """
    if type(model) is not qwen.Qwen3_5ForCausalLM:
        return f"it is written for Qwen3_5ForCausalLM, not {type(model).__name__}"
    config: Any = model.config
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope != "default":
        return f"rotary type {rope!r} depends on the length; only 'default' is written"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r} is not written, only silu"
    for name, module in model.named_modules():
        if type(module).__module__ not in _PLAIN:
            return f"{name} is a {type(module).__name__}, which does not belong to the plain model"
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name or 'the model'} has hooks, which only its own forward runs"
    if len({p.dtype for p in model.parameters()}) > 1:
        return "its parameters are of more than one type"
    return None


_PLAIN = {
    qwen.__name__,
    *(cls.__module__ for cls in (nn.Linear, nn.Embedding, nn.Conv1d, nn.ModuleList)),
    *(type(qwen.ACT2FN[name]).__module__ for name in ("silu",)),
}


def read_weights(model: nn.Module) -> ModelWeights:
    """The present weights of a module that `refusal` has nothing against."""
    text: Any = model.model
    head: Any = model.lm_head
    layers: list[LayerWeights] = []
    counts = {"linear_attention": 0, "full_attention": 0}
    for layer in text.layers:
        before, after = _factor(layer.input_layernorm), _factor(layer.post_attention_layernorm)
        mixer = (
            _delta(layer.linear_attn, before)
            if layer.block_type == "linear_attention"
            else _attention(layer.self_attn, before)
        )
        layers.append(
            LayerWeights(
                index=counts[layer.block_type],
                mixer=mixer,
                up_gate=Projection.of([_pair(layer.mlp.up_proj), _pair(layer.mlp.gate_proj)], after),
                down=Projection.of([_pair(layer.mlp.down_proj)]),
            )
        )
        counts[layer.block_type] += 1
    return ModelWeights(
        embed=text.embed_tokens.weight.detach(),
        layers=tuple(layers),
        eps=_eps(text.norm.eps, text.norm.weight),
        head=Projection.of([_pair(head)], _factor(text.norm)),
    )


def wide(x: Tensor) -> Tensor:
    """Float32, or float64 as it is: the type in which norms, decays and states are computed."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _pair(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return layer.weight.detach(), None if layer.bias is None else layer.bias.detach()


def _factor(norm: qwen.Qwen3_5RMSNorm) -> Tensor:
    return 1 + wide(norm.weight.detach())


def _eps(value: float, like: Tensor) -> Tensor:
    return torch.full((1,), value, dtype=wide(like.detach()).dtype, device=like.device)


def _delta(net: qwen.Qwen3_5GatedDeltaNet, before: Tensor) -> DeltaWeights:
    out, bias = _pair(net.out_proj)
    return DeltaWeights(
        project=Projection.of(
            [_pair(p) for p in (net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)], before
        ),
        conv=net.conv1d.weight.detach().squeeze(1),
        fade=-wide(net.A_log.detach()).exp(),
        dt_bias=net.dt_bias.detach(),
        out=Projection.of([(out, bias)], net.norm.weight.detach().repeat(net.num_v_heads)),
        eps=_eps(net.norm.variance_epsilon, out),
        key_heads=net.num_k_heads,
        value_heads=net.num_v_heads,
        key_dim=net.head_k_dim,
        value_dim=net.head_v_dim,
    )


def _attention(net: qwen.Qwen3_5Attention, before: Tensor) -> AttentionWeights:
    heads = net.q_proj.out_features // (2 * net.head_dim)
    kv_heads = net.k_proj.out_features // net.head_dim
    pairs = [_pair(p) for p in (net.q_proj, net.k_proj, net.v_proj)]
    project = Projection.of(pairs, before, join=False)
    if sum(w.numel() for w, _ in pairs) <= JOIN_ELEMENTS:
        (q, gate), (q_bias, gate_bias) = (_halves(x, heads, net.head_dim) for x in pairs[0])
        project = Projection.of([(q, q_bias), *pairs[1:], (gate, gate_bias)], before)
    return AttentionWeights(
        project=project,
        norm=torch.cat([_factor(net.q_norm).expand(heads, -1), _factor(net.k_norm).expand(kv_heads, -1)]),
        eps=_eps(net.q_norm.eps, net.q_norm.weight),
        out=Projection.of([_pair(net.o_proj)]),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=net.head_dim,
        scale=net.scaling,
    )


def _halves(x: Tensor | None, heads: int, dim: int) -> tuple[Any, Any]:
    """The rows of q_proj that make queries, and those that make the gate; they alternate head by head."""
    if x is None:
        return None, None
    parts = x.unflatten(0, (heads, 2, dim))
    return parts[:, 0].flatten(0, 1), parts[:, 1].flatten(0, 1)
