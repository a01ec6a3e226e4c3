"""Bound of the memory of a batch's caches: how many waiting requests may begin beside those that run.

Slots are one block of rows x tokens, so their bytes follow from the number of rows and from the longest one. A request
counts with all tokens that it may have, as nobody knows when it ends: what has begun never lacks memory later. Beside
the slots count the prefilled prompts that are held, those of the requests that begin, and the prefix cache.
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch

from rollout.config import CACHE_PART
from rollout.engine import Sampling
from rollout.native.cache.prefill_cache import PrefillCache
from rollout.native.cache.prefix_cache import PrefixCache
from rollout.native.decoders.decoder import Decoder
from rollout.native.scheduler.request import SequenceRequest

GIB = 2**30
LOGIT_BYTES = 4
TOKEN_INDICES, ROW_INDICES = 32, 16
"""Bytes of the indices by which caches are read, for each token of a prompt and for each row, at most."""


class MemoryBound:
    """Bound of the caches of one decoder, in bytes."""

    def __init__(self, decoder: Decoder[Any], nbytes: int) -> None:
        self._decoder, self.nbytes = decoder, nbytes
        self._reserved = 0
        with torch.no_grad():
            self._token_bytes = decoder.token_bytes  # a decoder may have to read a token for it

    def tokens(self, limit: int) -> int:
        """Return the bound of a cache in tokens, `limit` at most."""
        return min(limit, self.nbytes // CACHE_PART // self._token_bytes)

    def check(self, prompt: int, sampling: Sampling) -> None:
        """Raise ValueError with the numbers where a request with a prompt of so many tokens has no room even alone."""
        longest = prompt + sampling.max_new_tokens
        needed = self.alone(longest)
        if needed <= self.nbytes:
            return
        raise ValueError(
            f"a request of {longest} tokens ({prompt} of the prompt, {sampling.max_new_tokens} new ones) needs "
            f"{needed / GIB:.3g} GiB of caches, and the native sampler may take {self.nbytes / GIB:.3g} GiB: raise "
            "kv_cache_memory_bytes (in a run --rollout.kv-cache-memory-gib), or ask for fewer tokens"
        )

    def alone(self, longest: int) -> int:
        """Return the bytes that a request of at most so many tokens needs with nobody beside it."""
        return self._decoder.slot_bytes(1, longest) + self._read_bytes([longest])

    def admitted(
        self,
        waiting: Iterable[SequenceRequest],
        most: int,
        running: Sequence[SequenceRequest],
        rows: int,
        prefills: PrefillCache[Any],
        kept: PrefixCache[Any],
    ) -> int:
        """Return how many of the first `most` waiting requests may begin, and reserve their slots.

        Args:
            waiting: the requests that wait, in order.
            most: number of free slots.
            running: the requests in slots.
            rows: number of slots up to the highest one in use.
            prefills: the prefilled prompts that are held. They are dropped where nobody could begin beside them.
            kept: the prefix cache. It is cleared where nobody could begin beside it, and nothing runs.
        """
        asked = list(islice(waiting, most))
        count, reserved = self._fitting(asked, running, rows, prefills, kept)
        if asked and not count:
            prefills.clear()
            count, reserved = self._fitting(asked, running, rows, prefills, kept)
        if asked and not count and not running:
            kept.clear()
            count, reserved = self._fitting(asked, running, rows, prefills, kept)
        if count:
            longest = max(map(_most_tokens, (*running, *asked[:count])))
            self._decoder.reserve(max(rows, len(running) + count), longest)
            self._reserved = reserved
        return count

    def room(self, prefills: PrefillCache[Any], rows: int) -> int:
        """Return how many tokens a cache of so many rows may take beside the slots and the prompts that are held."""
        left = self.nbytes - self._reserved - self._held(prefills) - ROW_INDICES * rows
        return max(0, left) // self._token_bytes

    def release(self) -> None:
        """Note that nothing runs, and no slot is left."""
        self._reserved = 0

    def _fitting(
        self,
        requests: Sequence[SequenceRequest],
        running: Sequence[SequenceRequest],
        rows: int,
        prefills: PrefillCache[Any],
        kept: PrefixCache[Any],
    ) -> tuple[int, int]:
        """Return how many of the requests fit, and the bytes of all slots then."""
        left = self.nbytes - self._held(prefills) - kept.tokens * self._token_bytes - ROW_INDICES * len(kept)
        longest = max(map(_most_tokens, running), default=0)
        prompts: dict[tuple[int, ...], int] = {}
        reserved = 0
        for count, request in enumerate(requests):
            longest = max(longest, _most_tokens(request))
            if prefills.get(request.prompt) is None:
                prompts[request.prompt] = len(request.prompt)
            slots = self._decoder.slot_bytes(max(rows, len(running) + count + 1), longest)
            # a weight sync may read the longest row again
            if slots + max(self._read_bytes([*prompts.values()]), self._read_bytes([longest])) > left:
                return count, reserved
            reserved = slots
        return len(requests), reserved

    def _held(self, prefills: PrefillCache[Any]) -> int:
        return sum(self._read_bytes(lengths) for lengths in prefills.lengths)

    def _read_bytes(self, lengths: Sequence[int]) -> int:
        """Return the bytes of prompts that were read together: their cache, and the logits after each."""
        if not lengths:
            return 0
        rows = (len(lengths) + 1) * ROW_INDICES + len(lengths) * self._decoder.vocab_size * LOGIT_BYTES
        return self._decoder.size(lengths) * self._token_bytes + rows + sum(lengths) * TOKEN_INDICES


def _most_tokens(request: SequenceRequest) -> int:
    """Return how many tokens a request's row may come to hold."""
    return len(request.prompt) + request.sampling.max_new_tokens
