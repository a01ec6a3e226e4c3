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
        self.tokens = 0

    @property
    def caches(self) -> list[PrefillEntry[Cache]]:
        """An entry of each prefill: their caches and logits are all memory that is held. Other threads may ask."""
        known, ages = self._known.copy(), list(self._ages)  # each at once: prefills come and go meanwhile
        return [known[prompts[0]] for _, prompts in ages if prompts[0] in known]

    @property
    def lengths(self) -> list[list[int]]:
        """The prompts' lengths, those of each prefill together."""
        return [[len(prompt) for prompt in prompts] for _, prompts in self._ages]

    def get(self, prompt: tuple[int, ...]) -> PrefillEntry[Cache] | None:
        """Return the prefilled prompt, or None."""
        return self._known.get(prompt)

    def add(self, prompts: Sequence[tuple[int, ...]], logits: Tensor, cache: Cache) -> None:
        """Add a prefill of distinct new prompts, and drop the oldest beyond the bound."""
        for pick, prompt in enumerate(prompts):
            self._known[prompt] = PrefillEntry(Past(cache, pick), logits[pick])
        size = sum(map(len, prompts))
        self._ages.append((size, list(prompts)))
        self.tokens += size
        while self.tokens > self._max_tokens and len(self._ages) > 1:
            gone, old = self._ages.popleft()
            self.tokens -= gone
            for prompt in old:
                del self._known[prompt]

    def clear(self) -> None:
        """Drop all prefills: the weights have changed, or nothing runs."""
        self._known.clear()
        self._ages.clear()
        self.tokens = 0
