"""Which token of a packed stream lies on which rank, and which keys it sees. Integers, computed once a packed batch.

Contiguous: the stream is cut into cp_size equal intervals; sequences begin and end anywhere. Zigzag: every sequence is
cut into 2 x cp_size chunks and rank r takes chunks r and 2 x cp_size - 1 - r, which gives every rank the same share of
a causal triangle.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from dyncp.planning.sizes import Layout, check_layout, sequence_align
from seqpack.planning.padding import aligned_length

Ints = np.ndarray


class Run(NamedTuple):
    """Consecutive tokens of one sequence on one rank. start: position in the sequence; offset: position on the rank."""

    sequence: int
    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class Selection:
    """Some tokens of a tensor: `index` (i64) where they are scattered, else the slice start : start + length."""

    start: int
    length: int
    index: torch.Tensor | None

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """Return the selected tokens of x, whose tokens are the first dimension."""
        return x.narrow(0, self.start, self.length) if self.index is None else x.index_select(0, self.index)

    def add_to(self, target: torch.Tensor, x: torch.Tensor) -> None:
        """Add x in place: target[selection] += x."""
        if self.index is None:
            target.narrow(0, self.start, self.length).add_(x)
        else:
            target.index_add_(0, self.index, x.to(target.dtype))


@dataclass(frozen=True)
class Block:
    """Queries against keys, one segment a sequence: tokens cu_q[i]:cu_q[i+1] of q see cu_k[i]:cu_k[i+1] of k.

    causal: the last query of a segment sees its last key, the one before it all but the last, and so on.
    """

    q: Selection
    k: Selection
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    causal: bool

    @property
    def max_q(self) -> int:
        """Longest query segment."""
        return max(self.q_lengths)

    @property
    def max_k(self) -> int:
        """Longest key segment."""
        return max(self.k_lengths)


@dataclass(frozen=True)
class Sharding:
    """A packed stream over cp_size ranks.

    bounds: cu_seqlens of the stream as integers, padding included. In zigzag every sequence must be a multiple of
    2 x cp_size long, in contiguous the whole stream a multiple of cp_size (`dyncp.shard` pads). checked: what
    `dyncp.sharding.sharding_hash` has compared between ranks; not a part of the value.
    """

    bounds: tuple[int, ...]
    cp_size: int
    layout: Layout = "contiguous"
    checked: set[tuple[str, str]] = field(default_factory=set, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_layout(self.layout)
        align = sequence_align(self.cp_size, self.layout)
        lengths = np.diff(self.bounds)
        if not len(lengths) or self.bounds[0] != 0 or (lengths < 1).any():
            raise ValueError(f"cu_seqlens must start at 0 and increase, got {self.bounds}")
        if (lengths % align).any():
            bad = int(np.flatnonzero(lengths % align)[0])
            raise ValueError(
                f"zigzag over {self.cp_size} ranks needs every sequence padded to a multiple of {align}; sequence "
                f"{bad} has {lengths[bad]} tokens: pack with align={align}"
            )
        if self.total % self.cp_size:
            raise ValueError(
                f"{self.total} tokens cannot be cut evenly over {self.cp_size} ranks: pad the stream's end "
                f"to {aligned_length(self.total, self.cp_size)}"
            )

    @classmethod
    def of(cls, cu_seqlens: "torch.Tensor | Sequence[int] | Sharding", cp_size: int, layout: Layout) -> "Sharding":
        """Return the sharding of a stream given by cu_seqlens. A tensor on a device is copied to the host: pass a
        Sharding."""
        if isinstance(cu_seqlens, Sharding):
            if (cu_seqlens.cp_size, cu_seqlens.layout) != (cp_size, layout):
                raise ValueError(
                    f"the sharding is for {cu_seqlens.cp_size} ranks in {cu_seqlens.layout}, "
                    f"the call for {cp_size} in {layout}"
                )
            return cu_seqlens
        values = cu_seqlens.tolist() if isinstance(cu_seqlens, torch.Tensor) else cu_seqlens
        return cls(tuple(int(v) for v in values), cp_size, layout)

    @property
    def total(self) -> int:
        """Tokens of the whole stream."""
        return self.bounds[-1]

    @property
    def local_tokens(self) -> int:
        """Tokens on each rank."""
        return self.total // self.cp_size

    def runs(self, rank: int) -> tuple[Run, ...]:
        """Return the tokens of one rank in their local order."""
        return _runs(self, rank)

    def stream_index(self, rank: int) -> Ints:
        """Return i64[local_tokens]: the position in the stream of each local token."""
        return np.concatenate([np.arange(r.length) + self.bounds[r.sequence] + r.start for r in self.runs(rank)])

    @cached_property
    def gathered_order(self) -> Ints | None:
        """The map from stream position to position in the concatenated shards, i64[total]; None for the identity."""
        if self.layout == "contiguous" or self.cp_size == 1:
            return None
        return np.argsort(np.concatenate([self.stream_index(rank) for rank in range(self.cp_size)]))

    @cached_property
    def ring_steps(self) -> int:
        """Number of shards that a query may need: cp_size, or fewer where no sequence reaches that far to the left."""
        if self.layout == "zigzag":
            return self.cp_size
        firsts = np.array(self.bounds[:-1]) // self.local_tokens
        lasts = (np.array(self.bounds[1:]) - 1) // self.local_tokens
        return int((lasts - firsts).max()) + 1

    def cu_seqlens(self, device: torch.device) -> torch.Tensor:
        """Return i32[n + 1]: the boundaries of the whole stream. Cached."""
        return _cu_tensor(self.bounds, device)

    def local_cu_seqlens(self, rank: int, device: torch.device, extra: int = 0, again: int = 0) -> torch.Tensor:
        """Return i32[m + 1]: the boundaries of the pieces on one rank, after `extra` tokens; `again` tokens, where
        there are any, are one more piece at the end. Cached, so that all layers see one tensor."""
        lengths = [run.length for run in self.runs(rank)] + ([again] if again else [])
        return _cu_tensor((0, *np.cumsum(lengths) + extra), device)

    def block(self, q_rank: int, kv_rank: int, device: torch.device) -> Block | None:
        """Return the block of one rank's queries and another rank's keys; None where they see nothing. Cached."""
        return _block(self, q_rank, kv_rank, device)

    def stream_blocks(self, rank: int, device: torch.device) -> tuple[Block, ...]:
        """Return the blocks of one rank's queries and all keys. Every local token is in one block. Cached."""
        return _stream_blocks(self, rank, device)


@lru_cache(maxsize=256)
def _cu_tensor(bounds: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32, device=device)


@lru_cache(maxsize=256)
def _runs(sharding: Sharding, rank: int) -> tuple[Run, ...]:
    runs: list[Run] = []
    bounds, cp_size = sharding.bounds, sharding.cp_size
    begin = rank * sharding.local_tokens
    offset = 0
    for sequence, (start, end) in enumerate(pairwise(bounds)):
        if sharding.layout == "contiguous" or cp_size == 1:
            first, last = max(start, begin), min(end, begin + sharding.local_tokens)
            pieces = [(first - start, last - first)] if first < last else []
        else:
            chunk = (end - start) // (2 * cp_size)
            pieces = [(rank * chunk, chunk), ((2 * cp_size - 1 - rank) * chunk, chunk)]
        for position, length in pieces:
            runs.append(Run(sequence, position, length, offset))
            offset += length
    return tuple(runs)


@lru_cache(maxsize=1024)
def _block(sharding: Sharding, q_rank: int, kv_rank: int, device: torch.device) -> Block | None:
    mine, theirs = sharding.runs(q_rank), sharding.runs(kv_rank)
    if q_rank == kv_rank:
        return make_block(*_whole_sequences(mine), causal=True, device=device)
    by_sequence: dict[int, list[Run]] = {}
    for run in theirs:
        by_sequence.setdefault(run.sequence, []).append(run)
    q_segments: dict[int, list[Run]] = {}
    k_segments: dict[int, list[Run]] = {}
    for run in mine:
        seen = [other for other in by_sequence.get(run.sequence, []) if other.start < run.start]
        if not seen:
            continue
        known = k_segments.setdefault(run.sequence, seen)
        assert known == seen, "all seeing queries of a sequence see the same keys of another rank"
        q_segments.setdefault(run.sequence, []).append(run)
    if not q_segments:
        return None
    return make_block(_spans(q_segments), _spans(k_segments), causal=False, device=device)


@lru_cache(maxsize=256)
def _stream_blocks(sharding: Sharding, rank: int, device: torch.device) -> tuple[Block, ...]:
    halves = 1 if sharding.layout == "contiguous" or sharding.cp_size == 1 else 2
    blocks = []
    for half in range(halves):
        runs = sharding.runs(rank)[half::halves]
        q_spans = [[(run.offset, run.length)] for run in runs]
        k_spans = [[(sharding.bounds[run.sequence], run.start + run.length)] for run in runs]
        blocks.append(make_block(q_spans, k_spans, causal=True, device=device))
    return tuple(blocks)


Spans = list[list[tuple[int, int]]]


def make_block(q_spans: Spans, k_spans: Spans, causal: bool, device: torch.device) -> Block:
    """Return a block from the (offset, length) spans of each segment's queries and keys."""
    q_lengths = tuple(sum(length for _, length in spans) for spans in q_spans)
    k_lengths = tuple(sum(length for _, length in spans) for spans in k_spans)
    cu_q, cu_k = (
        torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device) for lengths in (q_lengths, k_lengths)
    )
    return Block(_selection(q_spans, device), _selection(k_spans, device), cu_q, cu_k, q_lengths, k_lengths, causal)


def _whole_sequences(runs: Sequence[Run]) -> tuple[Spans, Spans]:
    by_sequence: dict[int, list[Run]] = {}
    for run in runs:
        by_sequence.setdefault(run.sequence, []).append(run)
    spans = _spans(by_sequence)
    return spans, spans


def _spans(segments: dict[int, list[Run]]) -> Spans:
    return [[(run.offset, run.length) for run in runs] for _, runs in sorted(segments.items())]


def _selection(spans: Spans, device: torch.device) -> Selection:
    flat = [span for segment in spans for span in segment]
    start, total = flat[0][0], sum(length for _, length in flat)
    at = start
    for offset, length in flat:
        if offset != at:
            index = np.concatenate([np.arange(o, o + n) for o, n in flat])
            return Selection(start, total, torch.from_numpy(index).to(device))
        at += length
    return Selection(start, total, None)
