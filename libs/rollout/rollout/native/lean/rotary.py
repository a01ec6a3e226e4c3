"""Rotary factors by position, as the module itself makes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Rotation = Callable[[Tensor], Tensor]
"""What rotates queries and keys [T, h, D] of T tokens."""


@dataclass(frozen=True)
class HalfRotation:
    """The rotation of T tokens: x [T, h, D] becomes x * cos + (x @ swap) * sin.

    `cos` and `sin` [T, 1, D] are 1 and 0 where a dimension is not rotated; `swap` [D, D] exchanges the halves of the
    rotated dimensions and turns the sign of the second one, so each of its sums has one term and is exact.
    """

    cos: Tensor
    sin: Tensor
    swap: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x."""
        return (x * self.cos).addcmul_(x @ self.swap, self.sin)


@dataclass(frozen=True)
class PairRotation:
    """The same rotation in one operation, for x in `pair_order`: each pair of dimensions is a complex number.

    `factors` [T, 1, D / 2] are cos + i sin, and 1 where a pair is not rotated.
    """

    factors: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x."""
        return (x.view(self.factors.dtype) * self.factors).view(x.dtype)


class Rotary:
    """A table over positions that grows as they do; its module takes positions [axes, T]. Text has one position for all
    axes of the multi-axis rotary, which takes them as [axes, 1, T]. `pairs`: x will be in `pair_order`."""

    def __init__(self, module: nn.Module, head_dim: int, like: Tensor, axes: int, pairs: bool = False) -> None:
        self._module = module
        self._axes = axes
        self._head_dim = head_dim
        self._pairs = pairs
        self._like = like.new_empty(1)
        self._cos = self._sin = self._swap = like.new_empty(0, 1, head_dim)
        self._paired = like.new_empty(0, 1, 0)

    def take(self, positions: Tensor, longest: int) -> Rotation:
        """Return the rotation of tokens at positions [T], all of them below `longest`."""
        if longest > self._cos.shape[0]:
            self._grow(max(64, 2 * self._cos.shape[0], longest))
        if self._pairs:
            return PairRotation(self._paired.index_select(0, positions))
        return HalfRotation(self._cos.index_select(0, positions), self._sin.index_select(0, positions), self._swap)

    def by_axis(self, positions: Tensor) -> Rotation:
        """Return the rotation of tokens at positions [axes, T]: those of an image differ from axis to axis."""
        if not self._cos.shape[0]:
            self._grow(64)
        cos, sin = self._factors(positions[:, None])
        return PairRotation(self._complex(cos, sin)) if self._pairs else HalfRotation(cos, sin, self._swap)

    def _grow(self, count: int) -> None:
        every = torch.arange(count, device=self._like.device)[None]
        if self._axes > 1:  # one table for each axis: the older module needs it
            every = every.expand(self._axes, 1, count)
        self._cos, self._sin = self._factors(every)
        if self._pairs:
            self._paired = self._complex(self._cos, self._sin)

    def _complex(self, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the factors of pairs [T, 1, D / 2]: a pair's dimensions have the same cos and sin."""
        first = _pair_indices(self._head_dim, rotated_dims(self._module))[::2]
        return torch.complex(cos[..., first], sin[..., first])

    def _factors(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin [T, 1, D] of the module, for its positions of T tokens; the first call makes the swap."""
        cos, sin = self._module(self._like, positions)  # [1, T, R]
        count, size = sin.shape[1:]
        whole = self._like.new_ones(count, 1, self._head_dim), self._like.new_zeros(count, 1, self._head_dim)
        whole[0][..., :size], whole[1][..., :size] = cos[0, :, None], sin[0, :, None]
        if self._swap.dim() == 3:
            self._swap = self._like.new_zeros(self._head_dim, self._head_dim)
            half = size // 2
            for i in range(half):
                self._swap[half + i, i], self._swap[i, half + i] = -1, 1
        return whole


def rotated_dims(module: Any) -> int:
    """Return the number of dimensions that a rotary module rotates."""
    return 2 * int(module.inv_freq.shape[0])


def pair_order(module: nn.Module, head_dim: int, like: Tensor) -> Tensor | None:
    """Return the order [D] in which rotated dimensions stand in pairs; None without complex numbers of the type."""
    return torch.tensor(_pair_indices(head_dim, rotated_dims(module))) if has_pairs(like, head_dim) else None


def has_pairs(like: Tensor, head_dim: int) -> bool:
    """Return whether pairs of dimensions can be complex numbers on this device."""
    return like.device.type == "cpu" and like.dtype in (torch.float32, torch.float64) and head_dim % 2 == 0


def _pair_indices(head_dim: int, rotated: int) -> list[int]:
    """Return the dimensions in pairs: i with i + rotated / 2, then those that are not rotated."""
    half = rotated // 2
    return [d for i in range(half) for d in (i, half + i)] + list(range(rotated, head_dim))


def reordered(x: Tensor, order: Tensor | None, head_dim: int) -> Tensor:
    """Bring the dimensions of each head of x [h * D, ...] into the order."""
    return x if order is None else x.unflatten(0, (-1, head_dim)).index_select(1, order).flatten(0, 1)


def reordered_pairs(
    pairs: Sequence[tuple[Tensor, Tensor | None]], order: Tensor | None, head_dim: int
) -> list[tuple[Tensor, Tensor | None]]:
    """Bring the outputs of (weight, bias) pairs into the order, head by head."""
    return [(reordered(w, order, head_dim), None if b is None else reordered(b, order, head_dim)) for w, b in pairs]


def head_dim_of(config: Any) -> int:
    """Return the dimensions of a head, which older configurations leave out."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
