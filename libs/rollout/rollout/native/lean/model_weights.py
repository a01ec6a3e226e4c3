"""Weights of the lean pass: the module's own parameters, and small tensors derived from them.

Large matrices are the module's own tensors. Projections of one input whose matrices are small together are joined into
one, transposed, with the factors of the norm before them multiplied in: there a step's time is the number of calls, not
of multiplications. Derived tensors are copies, so `read` is called again when the module's weights have changed
(`fingerprint`). Each family has a file that reads them: `qwen3_5`, `dense`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollout.native.lean.product import Matrix, product

JOIN_ELEMENTS = 1 << 22
"""Most elements of all matrices of one input together for which they are joined."""


@dataclass(frozen=True)
class Projection:
    """One input [T, H], several outputs: by one joined matrix, or by separate matrices [size, H].

    `factor` [H] multiplies the input first; None where it is multiplied into the matrix. `shift` is added to the joined
    output.
    """

    sizes: tuple[int, ...]
    joined: Matrix | None
    shift: Tensor | None
    parts: tuple[tuple[Tensor, Tensor | None], ...]
    factor: Tensor | None

    @classmethod
    def of(
        cls, parts: Sequence[tuple[Tensor, Tensor | None]], factor: Tensor | None = None, join: bool = True
    ) -> "Projection":
        """Join the (weight, bias) pairs where they are small and `join` allows it."""
        sizes = tuple(w.shape[0] for w, _ in parts)
        if not join or not joinable(parts):
            return cls(sizes, None, None, tuple(parts), factor)
        whole, shift = torch.cat([w for w, _ in parts]), None
        if any(b is not None for _, b in parts):
            shift = torch.cat([w.new_zeros(w.shape[0]) if b is None else b for w, b in parts])
        if factor is not None and whole.dtype in (torch.float32, torch.float64):  # narrow types would round twice
            whole, factor = whole * factor, None
        return cls(sizes, Matrix.of(whole), shift, (), factor)

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """Return the outputs of x [T, H], each [T, size]."""
        if self.joined is None:
            x = self._scaled(x)
            return [product(x, w, b) for w, b in self.parts]
        y = self.whole(x)
        return (y,) if len(self.sizes) == 1 else torch.split_with_sizes(y, self.sizes, -1)

    def whole(self, x: Tensor) -> Tensor:
        """Return the joined output [T, sum of sizes]."""
        assert self.joined is not None
        return self.joined(self._scaled(x), self.shift)

    def added_to(self, h: Tensor, x: Tensor) -> Tensor:
        """Add the only output of x to h."""
        if self.joined is None or self.shift is not None:
            return h + self(x)[0]
        return self.joined(self._scaled(x), h)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.factor is None else (wide(x) * self.factor).to(x.dtype)


@dataclass(frozen=True)
class DeltaWeights:
    """A gated delta net. `project` gives qkv, z, b, a. `decay` is -exp(A_log), [Hv]; `conv` [D, K]."""

    project: Projection
    conv: Tensor
    decay: Tensor
    dt_bias: Tensor
    out: Projection
    eps: Tensor
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class AttentionWeights:
    """Softmax attention, gated or not. `norm` [Hq + Hkv, D]: factors of the norms of queries and keys, or None.

    `project` gives q, k, v and, if gated, the gate where it is joined; else q (with the gate, head by head), k and v.
    `order` [D]: in which the dimensions of queries and keys stand for the rotation (`rotary.pair_order`); None: as they
    are. A joined matrix and `norm` are in that order.
    """

    project: Projection
    norm: Tensor | None
    eps: Tensor
    out: Projection
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    gated: bool
    order: Tensor | None

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return queries and keys [T, Hq + Hkv, D], values [T, Hkv, D], gate [T, Hq * D] or None."""
        if self.project.joined is None:
            return self._apart(x)
        y = self.project.whole(x)
        heads, both = y.view(y.shape[0], -1, self.head_dim), self.heads + self.kv_heads
        if not self.gated:
            qk, v = torch.split_with_sizes(heads, (both, self.kv_heads), 1)
            return qk, v, None
        qk, v, gate = torch.split_with_sizes(heads, (both, self.kv_heads, self.heads), 1)
        return qk, v, gate.flatten(1)

    def _apart(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        q, k, v = self.project(x)
        gate: Tensor | None = None
        if self.gated:
            mine, its = q.unflatten(-1, (self.heads, 2 * self.head_dim)).chunk(2, dim=-1)
            q, gate = mine.flatten(1), its.flatten(1)
        both = torch.cat([q, k], dim=1).unflatten(-1, (self.heads + self.kv_heads, self.head_dim))
        if self.order is not None:
            both = both.index_select(2, self.order)
        return both, v.unflatten(-1, (self.kv_heads, self.head_dim)), gate


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; `index` counts the layers of its own kind. `up_gate` gives up and gate."""

    index: int
    mixer: DeltaWeights | AttentionWeights
    up_gate: Projection
    down: Projection


@dataclass(frozen=True)
class ModelWeights:
    """The whole model. The norms' factors are in the projections after them; `eps` [1] is theirs."""

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


def joinable(parts: Sequence[tuple[Tensor, Tensor | None]]) -> bool:
    """Return whether the (weight, bias) pairs of one input are small enough to be joined."""
    return sum(w.numel() for w, _ in parts) <= JOIN_ELEMENTS


def wide(x: Tensor) -> Tensor:
    """Cast to float32, except from float64: the type in which norms, decays and states are computed."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def pair(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a linear layer."""
    return layer.weight.detach(), None if layer.bias is None else layer.bias.detach()


def eps_of(value: float, like: Tensor) -> Tensor:
    """Return a norm's eps [1], in the type and on the device in which it is added."""
    return torch.full((1,), value, dtype=wide(like.detach()).dtype, device=like.device)
