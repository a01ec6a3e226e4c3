"""A plain Qwen3.5-shaped hybrid language model over dyncp: gated delta net layers, every fourth one full attention."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dyncp.ops.attention import attention
from dyncp.ops.gated_delta_rule import causal_conv1d, gated_delta_rule
from dyncp.planning.cost import CostModel
from dyncp.planning.methods import Method
from dyncp.sharding.layout import Sharding
from seqpack.planning.costs import SequenceCost
from seqpack.planning.flops import ModelFlops, delta_net, full_attention, mlp


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults have 0.67 B parameters."""

    vocab: int = 65536
    hidden: int = 2048
    intermediate: int = 6144
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 256
    delta_key_heads: int = 16
    delta_value_heads: int = 32
    delta_dim: int = 128
    full_every: int = 4

    @property
    def attention_layers(self) -> int:
        return self.layers // self.full_every

    @property
    def delta_layers(self) -> int:
        return self.layers - self.attention_layers

    @property
    def flops(self) -> ModelFlops:
        """The operations of the layers, as seqpack counts them."""
        feed_forward = mlp(self.hidden, self.intermediate)
        attends = full_attention(self.hidden, self.heads, self.kv_heads, self.head_dim, feed_forward, gated=True)
        recurs = delta_net(
            self.hidden, self.delta_key_heads, self.delta_value_heads, self.delta_dim, self.delta_dim, 4, feed_forward
        )
        layers = (attends,) * self.attention_layers + (recurs,) * self.delta_layers
        return ModelFlops(layers, head=2.0 * self.hidden * self.vocab)

    def cost(self, flops: float) -> CostModel:
        """Return the uncalibrated cost model of this shape."""
        return CostModel.of(self.flops, flops)

    def model_flops(self, lengths: list[int]) -> float:
        """Return forward and backward operations of these sequences, without recomputation."""
        count = SequenceCost.of(self.flops)
        return 3 * sum(count(length) for length in lengths)


TINY = Config(
    vocab=64, hidden=32, intermediate=48, layers=4, heads=4, kv_heads=2, head_dim=8, delta_key_heads=2,
    delta_value_heads=4, delta_dim=8,
)  # fmt: skip


@dataclass
class Place:
    """The places of the current call's tokens; one object for the whole model, changed before each call."""

    sharding: Sharding | None = None
    group: dist.ProcessGroup | None = None
    method: Method = "ulysses"
    backend: str = "auto"
    """Backend of the gated delta rule."""


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), 1e-6)


class Attention(nn.Module):
    def __init__(self, c: Config, place: Place) -> None:
        super().__init__()
        self.c, self.place = c, place
        self.q = nn.Linear(c.hidden, 2 * c.heads * c.head_dim, bias=False)
        self.kv = nn.Linear(c.hidden, 2 * c.kv_heads * c.head_dim, bias=False)
        self.out = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(c.head_dim), RMSNorm(c.head_dim)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        c, place = self.c, self.place
        q, gate = self.q(x).view(len(x), c.heads, 2 * c.head_dim).chunk(2, dim=-1)
        k, v = self.kv(x).view(len(x), 2, c.kv_heads, c.head_dim).unbind(1)
        q, k = rotate(self.q_norm(q), positions), rotate(self.k_norm(k), positions)
        assert place.sharding is not None
        y = attention(q, k, v, place.sharding, place.group, place.method, place.sharding.layout)
        out: torch.Tensor = self.out((y * gate.sigmoid()).flatten(1))
        return out


def rotate(x: torch.Tensor, positions: torch.Tensor, share: float = 0.25) -> torch.Tensor:
    """Rotate a share of each head, a quarter by default, by the rotary positions."""
    half = max(1, int(x.shape[-1] * share) // 2)
    angles = positions[:, None, None] * 1e7 ** (-torch.arange(half, device=x.device) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class DeltaNet(nn.Module):
    def __init__(self, c: Config, place: Place) -> None:
        super().__init__()
        self.c, self.place = c, place
        keys, values = c.delta_key_heads * c.delta_dim, c.delta_value_heads * c.delta_dim
        self.widths = [keys, keys, values]
        self.qkv = nn.Linear(c.hidden, sum(self.widths), bias=False)
        self.z = nn.Linear(c.hidden, values, bias=False)
        self.ba = nn.Linear(c.hidden, 2 * c.delta_value_heads, bias=False)
        self.taps = nn.Parameter(torch.randn(sum(self.widths), 4) / 2)
        self.log_decay = nn.Parameter(torch.zeros(c.delta_value_heads))
        self.dt_bias = nn.Parameter(torch.zeros(c.delta_value_heads))
        self.norm = RMSNorm(c.delta_dim)
        self.out = nn.Linear(values, c.hidden, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        c, place = self.c, self.place
        assert place.sharding is not None
        where = (place.sharding, place.group)
        mixed = causal_conv1d(self.qkv(x), self.taps.to(x.dtype), None, *where, activation="silu")
        q, k, v = mixed.split(self.widths, dim=1)
        q, k = (t.reshape(len(x), c.delta_key_heads, c.delta_dim) for t in (q, k))
        v = v.reshape(len(x), c.delta_value_heads, c.delta_dim)
        b, a = self.ba(x).chunk(2, dim=1)
        g = -self.log_decay.float().exp() * functional.softplus(a.float() + self.dt_bias.float())
        y = gated_delta_rule(q, k, v, g, b.sigmoid(), *where, backend=place.backend)
        y = self.norm(y) * functional.silu(self.z(x).view_as(y))
        out: torch.Tensor = self.out(y.flatten(1))
        return out


class Block(nn.Module):
    def __init__(self, c: Config, place: Place, index: int) -> None:
        super().__init__()
        full = index % c.full_every == c.full_every - 1
        self.mixer = Attention(c, place) if full else DeltaNet(c, place)
        self.norm1, self.norm2 = RMSNorm(c.hidden), RMSNorm(c.hidden)
        self.up = nn.Linear(c.hidden, 2 * c.intermediate, bias=False)
        self.down = nn.Linear(c.intermediate, c.hidden, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = x + self.mixer(self.norm1(x), positions)
        gate, up = self.up(self.norm2(x)).chunk(2, dim=-1)
        out: torch.Tensor = x + self.down(functional.silu(gate) * up)
        return out


class HybridModel(nn.Module):
    """ids, positions, targets of the local tokens -> the sum of their losses; a target of -100 is not trained."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.place = Place()
        self.embedding = nn.Embedding(c.vocab, c.hidden)
        self.blocks = nn.ModuleList(Block(c, self.place, i) for i in range(c.layers))
        self.norm = RMSNorm(c.hidden)
        self.head = nn.Linear(c.hidden, c.vocab, bias=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, positions)
        pieces = zip(self.norm(x).split(4096), targets.split(4096), strict=True)
        return torch.stack([checkpoint(self._loss, h, t, use_reentrant=False) for h, t in pieces]).sum()

    def _loss(self, h: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.head(h).float(), targets, ignore_index=-100, reduction="sum")
