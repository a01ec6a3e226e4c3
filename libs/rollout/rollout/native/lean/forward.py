"""The forward pass over tokens in one dimension, written once for packed prompts and for decode steps.

T tokens are side by side: those of packed prompts, or the newest one of each row. Layers that look beyond a token
(convolution, recurrence, attention) are methods of a `Mixers`, which knows what T means and keeps the caches.
"""

from typing import Protocol

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import silu, softplus

from rollout.native.lean.model_weights import AttentionWeights, DeltaWeights, ModelWeights, wide
from rollout.native.lean.rotary import Rotation


class Mixers(Protocol):
    """Layers that look beyond a token; `index` counts the layers of the kind."""

    def convolve(self, index: int, x: Tensor, weight: Tensor) -> Tensor:
        """Return the causal convolution and silu of x [T, D]."""
        ...

    def recur(self, index: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Return the gated delta rule of q, k [T, Hk, Dk], v [T, Hv, Dv], g, beta [T, Hv]: [T, Hv, Dv]."""
        ...

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Return softmax attention of q [T, Hq, D] to each sequence's k, v [T, Hkv, D] so far: [T, Hq, D]."""
        ...


def hidden_states(
    weights: ModelWeights, h: Tensor, turn: Rotation, mixers: Mixers, kept: Tensor | None = None
) -> Tensor:
    """Return the states [T, H] of embeddings h [T, H] after the last norm; its factor is in the head.

    Of tokens `kept`, int64, alone, where given: the others end before the last layer's MLP.
    """
    for layer in weights.layers:
        x = _norm(h, weights.eps)
        if isinstance(layer.mixer, DeltaWeights):
            h = _delta_net(layer.mixer, h, x, layer.index, mixers)
        else:
            h = _attention(layer.mixer, h, x, layer.index, turn, mixers)
        if kept is not None and layer is weights.layers[-1]:
            h = h[kept]
        both = layer.up_gate(_norm(h, weights.eps))
        h = layer.down.added_to(h, silu(both[1]).mul_(both[0]))
    return _norm(h, weights.eps)


def _norm(x: Tensor, eps: Tensor) -> Tensor:
    """Divide x [..., D] by sqrt(mean of squares + eps), in float32 at least."""
    y = wide(x)
    length = vector_norm(y, dim=-1, keepdim=True)
    y = y * torch.addcmul(eps, length, length, value=1 / x.shape[-1]).rsqrt_()
    return y if y.dtype == x.dtype else y.to(x.dtype)


def _delta_net(w: DeltaWeights, h: Tensor, x: Tensor, index: int, mixers: Mixers) -> Tensor:
    """Add the delta net of x to h."""
    qkv, z, b, a = w.project(x)
    keys = w.key_heads * w.key_dim
    y, count = mixers.convolve(index, qkv, w.conv), x.shape[0]
    q, k, v = torch.split_with_sizes(y, (keys, keys, w.value_heads * w.value_dim), 1)
    o = mixers.recur(
        index,
        q.view(count, w.key_heads, w.key_dim),
        k.view(count, w.key_heads, w.key_dim),
        v.view(count, w.value_heads, w.value_dim),
        w.decay * softplus(wide(a) + w.dt_bias),
        b.sigmoid(),
    )
    gated = wide(_norm(o, w.eps).flatten(1)) * silu(wide(z))
    return w.out.added_to(h, gated if gated.dtype == x.dtype else gated.to(x.dtype))


def _attention(w: AttentionWeights, h: Tensor, x: Tensor, index: int, turn: Rotation, mixers: Mixers) -> Tensor:
    """Add the attention of x to h."""
    both, v, gate = w.split(x)
    if w.norm is not None:
        both = _norm(both, w.eps).mul_(w.norm) if x.dtype == w.norm.dtype else _scaled_norm(both, w.norm, w.eps)
    q, k = torch.split_with_sizes(turn(both), (w.heads, w.kv_heads), 1)
    o = mixers.attend(index, q, k, v, w.scale).flatten(1)
    return w.out.added_to(h, o if gate is None else o * gate.sigmoid())


def _scaled_norm(x: Tensor, factor: Tensor, eps: Tensor) -> Tensor:
    """Compute norm and factor of a narrow type, rounded once as in the module."""
    return (_norm(x.float(), eps) * factor).to(x.dtype)
