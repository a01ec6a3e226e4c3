"""Prefix cache: decoding states of finished streams, so that a prompt that continues one is not read again.

A delta net's state can be continued from its end alone, so a stream serves the prompts that begin with all of its
tokens and have more. The longest such stream is found by bisection in an order of their bytes:

1. Every kept prefix of a prompt stands before the prompt itself, and all streams in between begin with it.
2. So if the stream just before the prompt is a prefix of it, it is the longest one.
3. If not, every kept prefix of the prompt is a prefix of what the two have in common: ask again with that.

Streams that came together are one cache and leave together, the cache that was used least recently first.
"""

from array import array
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple

from rollout.native.decoders.decoder import Cache, Past

MANY = 64
"""Streams of a cache from which they join and leave the order together, not one by one."""


class CachedPrefix(NamedTuple, Generic[Cache]):
    """A cached stream that a prompt begins with, and the number of its tokens."""

    past: Past[Cache]
    length: int


@dataclass(eq=False)
class _Group(Generic[Cache]):
    """Streams whose states lie in one cache, in order; `size` is its memory in tokens."""

    cache: Cache
    streams: Sequence[bytes]
    size: int


class PrefixCache(Generic[Cache]):
    """Caches of finished streams, of a size of at most `max_tokens` together."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._places: dict[bytes, tuple[_Group[Cache], int]] = {}
        self._order: list[bytes] = []
        self._groups: OrderedDict[_Group[Cache], None] = OrderedDict()  # least recently used first
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._order)

    @property
    def max_tokens(self) -> int:
        """The bound of `tokens`, the size of all caches."""
        return self._max_tokens

    @property
    def caches(self) -> list[Cache]:
        """The caches, each of which holds streams that came together. Other threads may ask."""
        return [group.cache for group in list(self._groups)]  # at once: groups come and go meanwhile

    def known(self, stream: bytes) -> bool:
        """Return whether a stream is cached; if so it counts as used."""
        place = self._places.get(stream)
        if place is not None:
            self._groups.move_to_end(place[0])
        return place is not None

    def longest(self, prompt: Sequence[int]) -> CachedPrefix[Cache] | None:
        """Return the longest cached stream that the prompt begins with and that is shorter than the prompt."""
        query = stream_of(prompt[:-1]) if self._order else b""
        while query:
            at = bisect_right(self._order, query)
            if at == 0:
                return None
            stream = self._order[at - 1]
            if query.startswith(stream):
                group, pick = self._places[stream]
                self._groups.move_to_end(group)
                return CachedPrefix(Past(group.cache, pick), len(stream) // _WIDTH)
            query = query[: _common(query, stream)]
        return None

    def add(self, streams: Sequence[bytes], cache: Cache, size: int) -> None:
        """Add a cache of distinct new streams, of at most `max_tokens`, and drop the oldest beyond the bound."""
        assert size <= self._max_tokens
        group = _Group(cache, streams, size)
        self._groups[group] = None
        self.tokens += size
        for pick, stream in enumerate(streams):
            assert stream not in self._places
            self._places[stream] = group, pick
        if len(streams) < MANY:
            for stream in streams:
                insort(self._order, stream)
        else:
            self._order.extend(streams)
            self._order.sort()
        self.shrink(self._max_tokens)

    def shrink(self, tokens: int) -> None:
        """Drop the oldest caches until their size is at most `tokens`."""
        while self.tokens > tokens:
            self._drop(next(iter(self._groups)))

    def clear(self) -> None:
        """Drop all streams: the weights have changed."""
        self._places.clear()
        self._order.clear()
        self._groups.clear()
        self.tokens = 0

    def _drop(self, group: _Group[Cache]) -> None:
        del self._groups[group]
        self.tokens -= group.size
        for stream in group.streams:
            del self._places[stream]
            if len(group.streams) < MANY:
                del self._order[bisect_left(self._order, stream)]
        if len(group.streams) >= MANY:
            self._order = [stream for stream in self._order if stream in self._places]


_WIDTH = array("I").itemsize


def stream_of(tokens: Sequence[int]) -> bytes:
    """Return tokens as bytes of equal width, which are compared, hashed and searched as a whole."""
    return array("I", tokens).tobytes()


def _common(a: bytes, b: bytes) -> int:
    """Return how many first bytes two strings have in common."""
    size = min(len(a), len(b))
    different = int.from_bytes(a[:size], "big") ^ int.from_bytes(b[:size], "big")
    return size - (different.bit_length() + 7) // 8
