"""Rotary factors by position, as the module itself makes them."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Rotation:
    """The rotation of T tokens: x [T, h, D] becomes x * cos + (x @ swap) * sin.

    `cos` and `sin` [T, 1, D] are 1 and 0 where a dimension is not rotated; `swap` [D, D] exchanges the halves of the
    rotated dimensions and turns the sign of the second one, so each of its sums has one term and is exact.
    """

    cos: Tensor
    sin: Tensor
    swap: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x."""
        return torch.addcmul(x * self.cos, x @ self.swap, self.sin)


class Rotary:
    """A table over positions that grows as they do; its module takes positions [axes, T]. Text has one position for all
    axes of the multi-axis rotary, which takes them as [axes, 1, T]."""

    def __init__(self, module: nn.Module, head_dim: int, like: Tensor, axes: int) -> None:
        self._module = module
        self._axes = axes
        self._head_dim = head_dim
        self._like = like.new_empty(1)
        self._cos = self._sin = self._swap = like.new_empty(0, 1, head_dim)

    def take(self, positions: Tensor, longest: int) -> Rotation:
        """Return the rotation of tokens at positions [T], all of them below `longest`."""
        if longest > self._cos.shape[0]:
            self._grow(max(64, 2 * self._cos.shape[0], longest))
        return Rotation(self._cos.index_select(0, positions), self._sin.index_select(0, positions), self._swap)

    def _grow(self, count: int) -> None:
        every = torch.arange(count, device=self._like.device)[None]
        if self._axes > 1:  # one table for each axis: the older module needs it
            every = every.expand(self._axes, 1, count)
        cos, sin = self._module(self._like, every)  # [1, count, R]
        size = sin.shape[-1]
        self._cos = self._like.new_ones(count, 1, self._head_dim)
        self._sin = self._like.new_zeros(count, 1, self._head_dim)
        self._cos[..., :size], self._sin[..., :size] = cos[0, :, None], sin[0, :, None]
        self._swap = self._like.new_zeros(self._head_dim, self._head_dim)
        half = size // 2
        for i in range(half):
            self._swap[half + i, i], self._swap[i, half + i] = -1, 1


def head_dim_of(config: Any) -> int:
    """Return the dimensions of a head, which older configurations leave out."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
