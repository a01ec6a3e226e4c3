"""Operations on rows of transformers' caches: pick, join, pad, crop.

Rows are aligned at their newest column: row r's tokens are the true columns of mask[r], which end at the last one.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

KINDS = (DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer)
"""The supported cache layers."""


@dataclass
class Rows:
    """Caches of n rows over L columns: `mask` [n, L] bool, `positions` [n, 1] of each row's next token, and where they
    are recorded the `experts` [n, L, layers, k] int16 of each token."""

    cache: DynamicCache
    mask: Tensor
    positions: Tensor
    experts: Tensor | None = None

    def pick(self, rows: Tensor) -> "Rows":
        """Copy the given rows, int64 [m]."""
        cache = copy.copy(self.cache)
        cache.layers = [_copied(layer) for layer in self.cache.layers]
        for layer in cache.layers:
            _change(layer, lambda x, _: x[rows])
        return Rows(cache, self.mask[rows], self.positions[rows], None if self.experts is None else self.experts[rows])

    @property
    def state_tokens(self) -> int:
        """Number of tokens whose keys and values take the memory of one row's states of fixed size."""
        state, token = self._sizes()
        return -(-state // token)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers, and one."""
        return self._sizes()[1]

    def _sizes(self) -> tuple[int, int]:
        """Return the bytes of a row's states of fixed size, and those of a token."""
        state, token = 0, 1
        for x, columns in ((x, columns) for layer in self.cache.layers for x, columns in _tensors(layer)):
            if columns is None:
                state += x.nbytes // x.shape[0]
            else:
                token += x.nbytes // (x.shape[0] * columns)
        return state, token

    def put(self, other: "Rows", slots: Sequence[int]) -> None:
        """Write other's rows over (or behind) the rows at `slots`; the shorter side is padded on the left."""
        width, count = max(self.mask.shape[1], other.mask.shape[1]), max(self.mask.shape[0], max(slots) + 1)
        self._widen(width)
        other._widen(width)
        at = torch.tensor(slots, device=self.mask.device)
        self.mask = _written(self.mask, other.mask, at, count)
        self.positions = _written(self.positions, other.positions, at, count)
        if self.experts is not None and other.experts is not None:
            self.experts = _written(self.experts, other.experts, at, count)
        for mine, theirs in zip(self.cache.layers, other.cache.layers, strict=True):
            source = iter([x for x, _ in _tensors(theirs)])
            _change(mine, lambda x, _, source=source: _written(x, next(source), at, count))  # type: ignore[misc]

    def keep(self, count: int) -> None:
        """Drop all but the first `count` rows, and the columns that none of them uses."""
        self.mask, self.positions = self.mask[:count], self.positions[:count]
        used = self.mask.any(dim=0)
        first = int(used.long().argmax()) if bool(used.any()) else used.numel() - 1
        self.mask = self.mask[:, first:]
        width = self.mask.shape[1]
        if self.experts is not None:
            self.experts = self.experts[:count, -width:]
        for layer in self.cache.layers:
            _change(layer, lambda x, columns: x[:count] if columns is None else x[:count, :, -width:])
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = width

    def _widen(self, width: int) -> None:
        """Pad on the left to `width` columns; a windowed layer holds no more than its window."""
        if self.experts is not None:
            self.experts = pad(self.experts, (0, 0, 0, 0, width - self.experts.shape[1], 0))
        self.mask = pad(self.mask, (width - self.mask.shape[1], 0))
        for layer in self.cache.layers:
            most = width
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.cumulative_length = width
                most = min(width, layer.sliding_window - 1)
            _change(layer, lambda x, n, most=most: x if n is None else pad(x, (0, 0, most - n, 0)))  # type: ignore[misc]


def _written(mine: Tensor, theirs: Tensor, at: Tensor, count: int) -> Tensor:
    out = mine.new_zeros(count, *mine.shape[1:])
    out[: mine.shape[0]] = mine
    out[at] = theirs
    return out


def _copied(layer: Any) -> Any:
    """Return a new layer that shares the other's tensors."""
    new = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(new, name, dict(value))
    return new


def joined(parts: Sequence[Rows]) -> Rows:
    """Return the rows of several caches, in order; the first part's are changed."""
    rows = parts[0]
    for part in parts[1:]:
        count = rows.mask.shape[0]
        rows.put(part, range(count, count + part.mask.shape[0]))
    return rows


def _tensors(layer: Any) -> list[tuple[Tensor, int | None]]:
    """Return a layer's tensors with their columns, in the order in which `_change` visits them."""
    tensors: list[tuple[Tensor, int | None]] = []

    def note(x: Tensor, columns: int | None) -> Tensor:
        tensors.append((x, columns))
        return x

    _change(layer, note)
    return tensors


def _change(layer: Any, change: Callable[[Tensor, int | None], Tensor]) -> None:
    """Replace each tensor x [n, ...] of a layer by change(x, columns); columns is None where x has none."""
    if isinstance(layer, DynamicLayer):
        columns = layer.keys.shape[2]
        layer.keys, layer.values = change(layer.keys, columns), change(layer.values, columns)
    if isinstance(layer, LinearAttentionLayer):
        for states in (layer.conv_states, layer.recurrent_states):
            for i, state in states.items():
                if state is not None:
                    states[i] = change(state, None)
