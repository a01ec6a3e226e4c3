"""Forward FLOPs of a model by layer: the one place that counts them (a multiply and an add are two).

Backward is twice forward. `seqpack.model_flops` reads a Hugging Face config (`seqpack.planning.family_flops` knows the
families); `full_attention`, `latent_attention` and `delta_net` with `mlp` and `experts` make layers from plain numbers,
for models that have no such config. `SequenceCost` is the cost of a sequence by its length; a planner of context
parallelism reads the layers themselves: what is linear, what is quadratic, and how many elements a rank would send.
"""

from dataclasses import dataclass
from typing import Literal

GDN_CHUNK = 64
"""Tokens of a chunk of the gated delta rule."""

LayerKind = Literal["full_attention", "sliding_attention", "linear_attention"]


@dataclass(frozen=True)
class LayerFlops:
    """One decoder layer.

    `linear`: FLOPs a token of the matrix products with parameters (projections; MLP, or router, active and shared
    experts), twice the parameters that a token meets. `pair`: FLOPs of a (query, key) pair, over all heads. `window`:
    pairs further apart than `window - 1` tokens are not computed (sliding_attention). `convolution`: FLOPs a token of a
    linear layer's causal convolution; `per_chunk`: of its recurrence, a started chunk of `GDN_CHUNK` tokens.

    Sizes, for communication: attention has `heads` query heads, `kv_heads` key and value heads as attention takes them
    (multi-head latent attention: one a query head); a linear layer `heads` value heads and `kv_heads` key heads.
    `key_dim` and `value_dim` are of one head.
    """

    kind: LayerKind
    linear: float
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    pair: float = 0.0
    window: int | None = None
    convolution: float = 0.0
    per_chunk: float = 0.0

    @property
    def recurrent(self) -> float:
        """FLOPs a token of convolution and recurrence in whole chunks; 0 for attention."""
        return self.convolution + self.per_chunk / GDN_CHUNK

    @property
    def query_width(self) -> int:
        """Elements of a token's queries."""
        return self.heads * self.key_dim

    @property
    def kv_width(self) -> int:
        """Elements of a token's keys and values."""
        return self.kv_heads * (self.key_dim + self.value_dim)

    @property
    def state_size(self) -> int:
        """Elements of a sequence's recurrent state S, one (key_dim, value_dim) matrix a value head; 0 for attention."""
        return self.heads * self.key_dim * self.value_dim if self.kind == "linear_attention" else 0


@dataclass(frozen=True)
class ModelFlops:
    """All decoder layers in order; `head`: FLOPs a token of the language model's head.

    For a planner of context parallelism, of one forward pass: `linear` and `recurrent` FLOPs a token; `pairs[window]`
    FLOPs of a (query, key) pair; `query_width` and `kv_width`, summed over the attention layers, are the elements a
    token that ranks send or gather; `state_size`, summed over the linear layers, those of a sequence's recurrent states
    (handing a shard's transition to the next rank takes heads * key_dim**2 elements a layer beside it).
    """

    layers: tuple[LayerFlops, ...]
    head: float = 0.0

    @property
    def linear(self) -> float:
        """FLOPs a token of all matrix products with parameters, the head included."""
        return sum(layer.linear for layer in self.layers) + self.head

    @property
    def recurrent(self) -> float:
        """FLOPs a token of convolutions and recurrences of all linear layers."""
        return sum(layer.recurrent for layer in self.layers)

    @property
    def pairs(self) -> dict[int | None, float]:
        """FLOPs of a (query, key) pair by window (None: full attention), summed over the layers of that window."""
        flops: dict[int | None, float] = {}
        for layer in self.layers:
            if layer.kind != "linear_attention":
                flops[layer.window] = flops.get(layer.window, 0.0) + layer.pair
        return flops

    def of_kind(self, kind: LayerKind) -> tuple[LayerFlops, ...]:
        """Return the layers of a kind."""
        return tuple(layer for layer in self.layers if layer.kind == kind)


def mlp(hidden: int, width: int, matrices: int = 3) -> float:
    """Return FLOPs a token of an MLP; a gated one has three matrices, a plain one two."""
    return 2.0 * matrices * hidden * width


def experts(hidden: int, width: int, total: int, active: int, shared: int = 0, shared_gate: bool = False) -> float:
    """Return FLOPs a token of a mixture: a router over `total` experts, `active` experts, and one shared expert.

    All are gated MLPs, of `width`, and of `shared` for the shared one. `shared_gate`: it has a gate of one number a
    token.
    """
    gate = 2.0 * hidden if shared and shared_gate else 0.0
    return 2.0 * hidden * total + active * mlp(hidden, width) + mlp(hidden, shared) + gate


def full_attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    feed_forward: float,
    gated: bool = False,
    window: int | None = None,
) -> LayerFlops:
    """Return a layer of full attention: projections of q, k, v and o, and `feed_forward` (`mlp` or `experts`).

    `gated`: the query projection also makes an output gate. `window`: tokens that one sees, itself included.
    """
    rows = (2 if gated else 1) * heads + 2 * kv_heads + heads
    return LayerFlops(
        kind="full_attention" if window is None else "sliding_attention",
        linear=2.0 * hidden * rows * head_dim + feed_forward,
        heads=heads,
        kv_heads=kv_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        pair=4.0 * heads * head_dim,
        window=window,
    )


def latent_attention(
    hidden: int,
    heads: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
    kv_rank: int,
    q_rank: int | None,
    feed_forward: float,
) -> LayerFlops:
    """Return a layer of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) as it is trained: expanded heads.

    Queries go through a bottleneck of `q_rank` (None: straight), keys and values through one of `kv_rank`, beside
    which `rope_dim` rotary dimensions are shared by all heads.
    """
    key_dim = nope_dim + rope_dim
    queries = hidden * heads * key_dim if q_rank is None else hidden * q_rank + q_rank * heads * key_dim
    keys_values = hidden * (kv_rank + rope_dim) + kv_rank * heads * (nope_dim + value_dim)
    return LayerFlops(
        kind="full_attention",
        linear=2.0 * (queries + keys_values + heads * value_dim * hidden) + feed_forward,
        heads=heads,
        kv_heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        pair=2.0 * heads * (key_dim + value_dim),
    )


def delta_net(
    hidden: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int, feed_forward: float
) -> LayerFlops:
    """Return a gated delta net layer, its recurrence in chunked form (Yang et al. 2024, arXiv 2412.06464).

    A chunk of c tokens takes, per value head: k k^T and q k^T, two triangular solves, three products with the state,
    and the values within the chunk. `kernel`: taps of the depthwise convolution over q, k and v.
    """
    mixed = 2 * key_heads * key_dim + value_heads * value_dim
    rows = mixed + 2 * value_heads * value_dim + 2 * value_heads  # q, k, v; gate and output; beta and decay
    c, k, v = GDN_CHUNK, key_dim, value_dim
    return LayerFlops(
        kind="linear_attention",
        linear=2.0 * hidden * rows + feed_forward,
        heads=value_heads,
        kv_heads=key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        convolution=2.0 * kernel * mixed,
        per_chunk=float(value_heads * (4 * c * c * k + c * c * (k + v) + 6 * c * k * v + 2 * c * c * v)),
    )
