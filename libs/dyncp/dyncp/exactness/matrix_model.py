"""A small reference model for the exactness matrix: embedding, then attention and gated-delta-net layers with
residuals.

Given a Place it runs one shard of a group through dyncp; given cu_seqlens it runs the whole stream on one rank through
a backend of seqpack.ops, by default the naive one that goes token by token. The two share parameters and nothing else.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from dyncp.ops.attention import attention
from dyncp.ops.gated_delta_rule import causal_conv1d, check_delta_layout, gated_delta_rule
from dyncp.planning.methods import Method
from dyncp.sharding.layout import Sharding
from seqpack.ops.conv import causal_conv1d as local_conv1d
from seqpack.ops.delta_rule import gated_delta_rule as local_delta_rule
from seqpack.ops.varlen_attention import attention as local_attention


@dataclass(frozen=True)
class Sizes:
    """Sizes of the reference model; the defaults deal evenly over 1, 2, 3 and 4 ranks."""

    vocab: int = 11
    hidden: int = 12
    query_heads: int = 12
    kv_heads: int = 4
    head_dim: int = 3
    delta_key_heads: int = 2
    delta_value_heads: int = 4
    key_dim: int = 4
    value_dim: int = 4
    taps: int = 4


@dataclass(frozen=True)
class Place:
    """The place of a call's tokens: the stream's sharding, the ranks that share it, attention's communication."""

    sharding: Sharding
    group: dist.ProcessGroup | None
    method: Method


class AttentionLayer(nn.Module):
    """Causal grouped-query attention without positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        heads = sizes.query_heads + 2 * sizes.kv_heads
        self.qkv = nn.Linear(sizes.hidden, heads * sizes.head_dim, bias=False)
        self.out = nn.Linear(sizes.query_heads * sizes.head_dim, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor, place: Place | torch.Tensor, oracle: str = "naive") -> torch.Tensor:
        """Run x [tokens, hidden]; place: of a shard, or cu_seqlens for the oracle over the whole stream."""
        s = self.sizes
        mixed = self.qkv(x).view(len(x), -1, s.head_dim)
        q, k, v = mixed.split([s.query_heads, s.kv_heads, s.kv_heads], dim=1)
        if isinstance(place, Place):
            y = attention(q, k, v, place.sharding, place.group, place.method, place.sharding.layout)
        else:
            y = local_attention(q, k, v, place, backend=oracle)
        result: torch.Tensor = x + self.out(y.flatten(1))
        return result


class DeltaLayer(nn.Module):
    """Short convolution, gated delta rule, output projection."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.widths = [
            sizes.delta_key_heads * sizes.key_dim,
            sizes.delta_key_heads * sizes.key_dim,
            sizes.delta_value_heads * sizes.value_dim,
        ]
        self.qkv = nn.Linear(sizes.hidden, sum(self.widths), bias=False)
        self.gates = nn.Linear(sizes.hidden, 2 * sizes.delta_value_heads)
        self.taps = nn.Parameter(torch.randn(sum(self.widths), sizes.taps) / 2)
        self.out = nn.Linear(self.widths[2], sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor, place: Place | torch.Tensor, oracle: str = "naive") -> torch.Tensor:
        """Run x [tokens, hidden]; place: of a shard, or cu_seqlens for the oracle over the whole stream."""
        s = self.sizes
        decay, beta = self.gates(x).chunk(2, dim=1)
        g, beta = -nn.functional.softplus(decay), beta.sigmoid()
        mixed = self.qkv(x)
        if isinstance(place, Place):
            layout = place.sharding.layout
            mixed = causal_conv1d(mixed, self.taps, None, place.sharding, place.group, "silu", layout=layout)
        else:
            mixed = local_conv1d(mixed, self.taps, None, place, "silu", backend=oracle)
        q, k, v = mixed.split(self.widths, dim=1)
        q, k = (t.view(len(x), s.delta_key_heads, s.key_dim) for t in (q, k))
        v = v.view(len(x), s.delta_value_heads, s.value_dim)
        if isinstance(place, Place):
            y = gated_delta_rule(q, k, v, g, beta, place.sharding, place.group, layout=place.sharding.layout)
        else:
            y = local_delta_rule(q, k, v, g, beta, place, backend=oracle)[0]
        result: torch.Tensor = x + self.out(y.flatten(1))
        return result


LAYERS = {
    "attention": (AttentionLayer, AttentionLayer),
    "gated delta net": (DeltaLayer, DeltaLayer),
    "hybrid": (DeltaLayer, AttentionLayer, DeltaLayer),
}


class MatrixModel(nn.Module):
    """The layers of one row of the matrix over an embedding."""

    def __init__(self, kind: str, sizes: Sizes) -> None:
        super().__init__()
        self.kind = kind
        self.embedding = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(layer(sizes) for layer in LAYERS[kind])

    def forward(self, ids: torch.Tensor, place: Place | torch.Tensor, oracle: str = "naive") -> torch.Tensor:
        """Run ids [tokens] -> [tokens, hidden]. ValueError for a layout that a layer cannot take."""
        if isinstance(place, Place) and self.kind != "attention":
            check_delta_layout(place.sharding.layout)
        # Summed in 32 bits at least: a bfloat16 table loses more in its gradient than all layers together.
        table = self.embedding.weight
        x = nn.functional.embedding(ids, table.to(torch.promote_types(table.dtype, torch.float32))).to(table.dtype)
        for layer in self.layers:
            x = layer(x, place, oracle)
        return x


def build_model(kind: str, sizes: Sizes, dtype: torch.dtype, device: str) -> MatrixModel:
    """Return the model, with the same random weights on every rank."""
    torch.manual_seed(7)
    return MatrixModel(kind, sizes).to(dtype=dtype, device=device)
