"""Slots of decoding rows: keys and values by position, convolution and recurrent states, advanced one token a step.

Row r's keys and values of its position p are at kv[r, p]: rows of any length are side by side, a step writes each row's
newest at its own length, and positions past a row's length are masked. Both dimensions grow by doubling.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from rollout.native.lean.model_weights import ModelWeights
from rollout.native.lean.newest import attend_newest
from rollout.native.lean.prefill import PackedCache, spans
from seqpack.ops import causal_conv1d_step, gated_delta_rule_step

MIN_LENGTH = 32


class Slots:
    """The caches of all layers, and the `Mixers` of a decode step over the first n slots.

    `lengths[r]` counts the tokens of slot r that are in the cache.
    """

    def __init__(self, weights: ModelWeights) -> None:
        like, attention, delta = weights.embed, weights.attention, weights.delta
        wide = torch.promote_types(like.dtype, torch.float32)
        self.lengths: list[int] = []
        self._length = 0  # positions of the kv buffers
        self._kv = [like.new_empty(0, 0, 2, a.kv_heads, a.head_dim) for a in attention]
        channels = [2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim for d in delta]
        self._conv = [like.new_empty(0, d.conv.shape[1] - 1, c) for d, c in zip(delta, channels, strict=True)]
        self._state = [like.new_empty(0, d.value_heads, d.key_dim, d.value_dim, dtype=wide) for d in delta]
        token = sum(prod(kv.shape[2:]) * kv.itemsize for kv in self._kv) or like.shape[1] * like.itemsize
        row = sum(prod(state.shape[1:]) * state.itemsize for state in (*self._conv, *self._state))
        self.state_tokens = -(-row // token)
        """Tokens whose keys and values (without attention: whose embeddings) take the memory of one row's states."""
        self._device = like.device
        self._n = 0
        self._span = 0
        self._writes = torch.empty(0, dtype=torch.int64)
        self._mask: Tensor | None = None

    @property
    def positions(self) -> Tensor:
        """The position of each row's next token, int64 [rows]."""
        return torch.tensor(self.lengths, device=self._device)

    def place(self, cache: PackedCache, picks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy picked prompts into slots, which may lie beyond those that exist."""
        self._reserve(max(slots) + 1, max(cache.lengths[i] for i in picks) + 1)
        for pick, slot in zip(picks, slots, strict=True):
            self.lengths[slot] = cache.lengths[pick]
        source, target = cache.tokens_of(picks), self._tokens_of(slots)
        for mine, kv in zip(self._kv, cache.kv, strict=True):
            mine.flatten(0, 1).index_copy_(0, target, kv.index_select(0, source))
        chosen, rows = torch.tensor([picks, slots], device=self._device)
        for mine, conv in zip(self._conv, cache.conv, strict=True):
            mine.index_copy_(0, rows, conv.transpose(1, 2).index_select(0, chosen))
        for mine, state in zip(self._state, cache.state, strict=True):
            mine.index_copy_(0, rows, state.index_select(0, chosen).to(mine.dtype))

    def keep(self, slots: Sequence[int]) -> PackedCache:
        """Copy rows into a packed cache."""
        source, rows = self._tokens_of(slots), torch.tensor(slots, device=self._device)
        cache = PackedCache.of([self.lengths[s] for s in slots], self._device)
        cache.kv = [kv.flatten(0, 1).index_select(0, source) for kv in self._kv]
        cache.conv = [conv.index_select(0, rows).transpose(1, 2) for conv in self._conv]
        cache.state = [state.index_select(0, rows) for state in self._state]
        return cache

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots."""
        longest = max(self.lengths[s] for s in sources)
        for source, target in zip(sources, targets, strict=True):
            self.lengths[target] = self.lengths[source]
        chosen, rows = torch.tensor([sources, targets], device=self._device)
        for kv in self._kv:
            kv[rows, :longest] = kv[chosen, :longest]
        for states in (self._conv, self._state):
            for state in states:
                state.index_copy_(0, rows, state.index_select(0, chosen))

    def begin(self, n: int) -> None:
        """Prepare a step of the first n rows: the positions that each writes, and the mask of what each sees."""
        lengths = self.lengths[:n]
        self._reserve(n, max(lengths) + 1)
        self._n, self._span = n, max(lengths) + 1
        self._mask = None
        now = torch.tensor(lengths, device=self._device)
        self._writes = torch.arange(0, n * self._length, self._length, device=self._device) + now
        if min(lengths) + 1 < self._span:
            hidden = torch.arange(self._span, device=self._device) > now[:, None]
            self._mask = torch.zeros(n, 1, 1, self._span, device=self._device, dtype=self._dtype)
            self._mask.masked_fill_(hidden[:, None, None], float("-inf"))

    def end(self) -> None:
        """Count one more token for each row of the step."""
        for row in range(self._n):
            self.lengths[row] += 1

    def convolve(self, index: int, x: Tensor, weight: Tensor) -> Tensor:
        """Advance the convolutions by a token."""
        past = self._conv[index].narrow(0, 0, self._n)
        y, after = causal_conv1d_step(x, past.transpose(1, 2), weight, None, "silu")
        past.copy_(after.transpose(1, 2))
        return y

    def recur(self, index: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Advance the recurrent states by a token."""
        return gated_delta_rule_step(q, k, v, g, beta, self._state[index].narrow(0, 0, self._n), inplace=True)[0]

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Write the newest keys and values; return attention to all tokens of each row."""
        kv = self._kv[index]
        kv.flatten(0, 1).index_copy_(0, self._writes, torch.stack([k, v], dim=1))
        return attend_newest(q, kv.narrow(0, 0, self._n).narrow(1, 0, self._span), self._mask, scale)

    def _tokens_of(self, slots: Sequence[int]) -> Tensor:
        """Return the indices of slots' tokens in the flat buffers of keys and values, slot by slot, int64."""
        return spans([s * self._length for s in slots], [self.lengths[s] for s in slots], self._device)

    @property
    def _dtype(self) -> torch.dtype:
        return self._kv[0].dtype if self._kv else torch.float32

    def _reserve(self, rows: int, length: int) -> None:
        """Allocate at least `rows` rows of `length` tokens."""
        if length > self._length:
            self._length = max(MIN_LENGTH, 2 * self._length, length)
            self._kv = [_grown(kv, 1, self._length) for kv in self._kv]
        present = len(self.lengths)
        if rows > present:
            rows = max(rows, 2 * present)
            self.lengths += [0] * (rows - present)
            for tensors in (self._kv, self._conv, self._state):
                tensors[:] = [_grown(t, 0, rows) for t in tensors]


def _grown(x: Tensor, dim: int, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = size
    # Zeros, not uninitialised memory: a masked value is multiplied by 0, and 0 * NaN is NaN.
    out = x.new_zeros(shape)
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out
