"""Slots of decoding rows: keys and values by position, convolution and recurrent states, advanced one token a step.

Row r's keys of its position p are at kv[0, r, p], its values at kv[1, r, p]: rows of any length are side by side, a
step writes each row's newest at its own length, and positions past a row's length are masked. Both dimensions grow by
doubling, up to a bound where there is one (`reserve`), one tensor after another.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from rollout.native.lean.model_weights import ModelWeights
from rollout.native.lean.newest import LEAST_SPAN, attend_newest
from rollout.native.lean.newest_state import convolve_newest, recur_newest
from rollout.native.lean.prefill import PackedCache, spans

MIN_LENGTH = 32
PLACES = 64
"""Bytes of a row's positions in a step."""


class Slots:
    """The caches of all layers, and the `Mixers` of a decode step over the first n slots.

    `lengths[r]` counts the tokens of slot r that are in the cache; `positions` [n] are those of the step's tokens,
    all below `span`: the lengths, less what images before them do not count (`PackedCache.ahead`).
    """

    def __init__(self, weights: ModelWeights) -> None:
        like, attention, delta = weights.embed, weights.attention, weights.delta
        wide = torch.promote_types(like.dtype, torch.float32)
        self.lengths: list[int] = []
        self._ahead: list[int] = []
        self._length = 0  # positions of the kv buffers
        self._kv = [like.new_empty(2, 0, 0, a.kv_heads, a.head_dim) for a in attention]
        channels = [2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim for d in delta]
        self._conv = [like.new_empty(0, d.conv.shape[1] - 1, c) for d, c in zip(delta, channels, strict=True)]
        self._state = [like.new_empty(0, d.value_heads, d.key_dim, d.value_dim, dtype=wide) for d in delta]
        self._sizes = [2 * prod(kv.shape[3:]) * kv.itemsize for kv in self._kv]  # bytes of a token of each
        self._states = [prod(state.shape[1:]) * state.itemsize for state in (*self._conv, *self._state)]
        self.token_bytes = sum(self._sizes) or like.shape[1] * like.itemsize
        """Bytes of a token's keys and values; without attention of its embedding."""
        self.state_tokens = -(-sum(self._states) // self.token_bytes)
        """Tokens of this size that take the memory of one row's states."""
        self._most: tuple[int, int] | None = None
        self._device = like.device
        self.positions = torch.empty(0, dtype=torch.int64)
        self.span = 0
        self._n = 0
        self._steady = 0  # rows of the last step, where nothing but it has changed since
        self._longest = 0  # tokens that the longest row sees
        self._places = self._writes = self.positions  # positions and writes [2, n]; places in buffers by token [n]
        self._hidden: Tensor | None = None  # [n, L]: 0 at the tokens of a row, -inf beyond
        self._mask: Tensor | None = None
        self._tokens: list[tuple[Tensor, Tensor]] = []
        """Of each attention layer: keys and values by token [R * L, H, D]."""
        self._seen: list[tuple[Tensor, ...]] = []
        """Of each attention layer: the keys and values that the step sees [n, H, span, D]."""
        self._newest: list[tuple[Tensor, Tensor]] = []
        """Of each delta net: what the step's rows have in `_conv` and `_state`."""

    def nbytes(self, rows: int, length: int) -> int:
        """Return the bytes of so many rows of so many tokens, with the mask and places of a step and a copy of the
        largest tensor while they grow."""
        largest = max([length * size for size in self._sizes] + self._states)
        mask = length * (self._kv[0].itemsize + 1) if self._kv else 0
        return rows * (length * sum(self._sizes) + sum(self._states) + largest + mask + PLACES) + 8 * length

    def reserve(self, rows: int, length: int) -> None:
        """Bound what is allocated; see `Decoder.reserve`."""
        self._most = rows, length
        have = len(self.lengths), self._length
        if have[0] and self.nbytes(*have) > self.nbytes(rows, length):
            self._resize(min(have[0], rows), min(have[1], length))

    def place(self, cache: PackedCache, picks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy picked prompts into slots, which may lie beyond those that exist."""
        self._steady = 0
        self._reserve(max(slots) + 1, max(cache.lengths[i] for i in picks) + 1)
        for pick, slot in zip(picks, slots, strict=True):
            self.lengths[slot], self._ahead[slot] = cache.lengths[pick], cache.ahead[pick]
        source, target = cache.tokens_of(picks), self._tokens_of(slots)
        for mine, kv in zip(self._kv, cache.kv, strict=True):
            for tokens, placed in zip(mine.flatten(1, 2), kv.unbind(1), strict=True):
                tokens.index_copy_(0, target, placed.index_select(0, source))
        chosen, rows = torch.tensor([picks, slots], device=self._device)
        for mine, conv in zip(self._conv, cache.conv, strict=True):
            mine.index_copy_(0, rows, conv.transpose(1, 2).index_select(0, chosen))
        for mine, state in zip(self._state, cache.state, strict=True):
            mine.index_copy_(0, rows, state.index_select(0, chosen).to(mine.dtype))

    def keep(self, slots: Sequence[int]) -> PackedCache:
        """Copy rows into a packed cache."""
        source, rows = self._tokens_of(slots), torch.tensor(slots, device=self._device)
        cache = PackedCache.of([self.lengths[s] for s in slots], self._device, [self._ahead[s] for s in slots])
        cache.kv = [kv.flatten(1, 2).index_select(1, source).transpose(0, 1) for kv in self._kv]
        cache.conv = [conv.index_select(0, rows).transpose(1, 2) for conv in self._conv]
        cache.state = [state.index_select(0, rows) for state in self._state]
        return cache

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy slots."""
        self._steady = 0
        longest = max(self.lengths[s] for s in sources)
        for source, target in zip(sources, targets, strict=True):
            self.lengths[target], self._ahead[target] = self.lengths[source], self._ahead[source]
        chosen, rows = torch.tensor([sources, targets], device=self._device)
        for kv in self._kv:
            kv[:, rows, :longest] = kv[:, chosen, :longest]
        for states in (self._conv, self._state):
            for state in states:
                state.index_copy_(0, rows, state.index_select(0, chosen))

    def release(self, slot: int) -> None:
        """Forget the tokens of a slot."""
        self._steady = 0
        self.lengths[slot] = self._ahead[slot] = 0

    def begin(self, n: int) -> None:
        """Prepare a step of the first n rows: the positions that each writes, and the mask of what each sees."""
        steady = n == self._steady and self._longest < self._length
        if steady:
            self._longest += 1
            self._places.add_(1)
            if self._hidden is not None:
                self._hidden.view(-1).index_fill_(0, self._writes, 0.0)
        else:
            self._lay_out(n)
        self._steady, span = 0, self._longest
        if self._device.type == "cpu":
            span = min(-(-span // LEAST_SPAN) * LEAST_SPAN, self._length)
        if not steady or span != self.span:
            self._n, self.span = n, span
            self._mask = None if self._hidden is None else self._hidden[:, None, None, :span]
            self._seen = [kv.transpose(2, 3)[:, :n, :, :span].unbind(0) for kv in self._kv]

    def _lay_out(self, n: int) -> None:
        """Compute what a step of the first n rows needs from their lengths; the steps after it count on from there."""
        lengths, device = self.lengths[:n], self._device
        self._longest = max(lengths) + 1
        self._reserve(n, self._longest)
        now, ahead = torch.tensor([lengths, self._ahead[:n]], device=device)
        starts = torch.arange(0, n * self._length, self._length, device=device)
        self._places = torch.stack([now + ahead, starts + now])
        self.positions, self._writes = self._places.unbind(0)
        self._newest = [(c.narrow(0, 0, n), s.narrow(0, 0, n)) for c, s in zip(self._conv, self._state, strict=True)]
        self._hidden = None
        if self._kv and (device.type == "cpu" or min(lengths) + 1 < self._longest):
            beyond = torch.arange(self._length, device=device) > now[:, None]
            self._hidden = self._kv[0].new_zeros(()).masked_fill(beyond, float("-inf"))

    def end(self) -> None:
        """Count one more token for each row of the step."""
        self.lengths[: self._n] = [length + 1 for length in self.lengths[: self._n]]
        self._steady = self._n

    def convolve(self, index: int, x: Tensor, weight: Tensor) -> Tensor:
        """Advance the convolutions by a token."""
        return convolve_newest(x, self._newest[index][0], weight)

    def recur(self, index: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        """Advance the recurrent states by a token."""
        return recur_newest(q, k, v, g, beta, self._newest[index][1])

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Write the newest keys and values; return attention to all tokens of each row."""
        key_tokens, value_tokens = self._tokens[index]
        key_tokens.index_copy_(0, self._writes, k)
        value_tokens.index_copy_(0, self._writes, v)
        keys, values = self._seen[index]
        return attend_newest(q, keys, values, self._mask, scale)

    def _tokens_of(self, slots: Sequence[int]) -> Tensor:
        """Return the indices of slots' tokens in the flat buffers of keys and values, slot by slot, int64."""
        return spans([s * self._length for s in slots], [self.lengths[s] for s in slots], self._device)

    def _reserve(self, rows: int, length: int) -> None:
        """Allocate at least `rows` rows of `length` tokens."""
        present = len(self.lengths)
        if rows <= present and length <= self._length:
            return
        wanted = max(rows, 2 * present) if rows > present else present
        longer = max(MIN_LENGTH, 2 * self._length, length) if length > self._length else self._length
        if self._most is not None:
            wanted, longer = max(rows, min(wanted, self._most[0])), max(length, min(longer, self._most[1]))
        self._resize(wanted, longer)

    def _resize(self, rows: int, length: int) -> None:
        """Copy what is there into buffers of this size, one tensor after another."""
        added = rows - len(self.lengths)
        self.lengths = self.lengths[:rows] + [0] * added
        self._ahead = self._ahead[:rows] + [0] * added
        self._length = length
        self._steady, self._tokens, self._seen, self._newest = 0, [], [], []  # views of the old buffers
        self._hidden = self._mask = None
        for tensors in (self._kv, self._conv, self._state):
            for index, x in enumerate(tensors):
                tensors[index] = _resized(x, rows, length) if tensors is self._kv else _resized(x[None], rows)[0]
                del x
        self._tokens = [(kv[0].flatten(0, 1), kv[1].flatten(0, 1)) for kv in self._kv]


def _resized(x: Tensor, rows: int, length: int | None = None) -> Tensor:
    """Return x [n, R, ...] or [n, R, L, ...] with so many rows and positions, zeros where there was nothing."""
    sizes = (rows,) if length is None else (rows, length)
    # Zeros, not uninitialised memory: a masked value is multiplied by 0, and 0 * NaN is NaN.
    out = x.new_zeros(x.shape[0], *sizes, *x.shape[1 + len(sizes) :])
    both = tuple(slice(min(new, old)) for new, old in zip(sizes, x.shape[1:], strict=False))
    out[(slice(None), *both)] = x[(slice(None), *both)]
    return out
