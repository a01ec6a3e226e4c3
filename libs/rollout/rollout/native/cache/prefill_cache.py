"""Prefill cache: a prompt that comes again, at once or later, is not computed again."""

from collections import deque
from collections.abc import Sequence
from typing import Generic, NamedTuple

from torch import Tensor

from rollout.native.decoders.decoder import Cache, Past


class PrefillEntry(NamedTuple, Generic[Cache]):
    """A prompt that was read: its row in a prefill's cache, and the logits [V] after it."""

    past: Past[Cache]
    logits: Tensor


class PrefillCache(Generic[Cache]):
    """The newest prefills, of at most `max_tokens` prompt tokens together, and always the last one."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._known: dict[tuple[int, ...], PrefillEntry[Cache]] = {}
        self._ages: deque[tuple[int, list[tuple[int, ...]]]] = deque()
        self._tokens = 0

    def get(self, prompt: tuple[int, ...]) -> PrefillEntry[Cache] | None:
        """Return the prefilled prompt, or None."""
        return self._known.get(prompt)

    def add(self, prompts: Sequence[tuple[int, ...]], logits: Tensor, cache: Cache) -> None:
        """Add a prefill of distinct new prompts, and drop the oldest beyond the bound."""
        for pick, prompt in enumerate(prompts):
            self._known[prompt] = PrefillEntry(Past(cache, pick), logits[pick])
        size = sum(map(len, prompts))
        self._ages.append((size, list(prompts)))
        self._tokens += size
        while self._tokens > self._max_tokens and len(self._ages) > 1:
            gone, old = self._ages.popleft()
            self._tokens -= gone
            for prompt in old:
                del self._known[prompt]

    def clear(self) -> None:
        """Drop all prefills: the weights have changed, or nothing runs."""
        self._known.clear()
        self._ages.clear()
        self._tokens = 0
