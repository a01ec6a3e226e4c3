"""The lean decoder: a module's weights, read by family, with prompts packed and rows in slots."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from rollout.native.decoders.decoder import Past
from rollout.native.decoders.fingerprint import fingerprint
from rollout.native.lean.continuation import Continued
from rollout.native.lean.families import family_of
from rollout.native.lean.forward import hidden_states
from rollout.native.lean.prefill import PackedCache
from rollout.native.lean.rotary import Rotary, head_dim_of
from rollout.native.lean.slots import Slots
from seqpack.memory import ledger


class LeanDecoder:
    """A `Decoder` over the models of `families`; ValueError where it would leave something out."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._read: object = None
        self.refresh()
        text: Any = model.model
        self._rotary = Rotary(
            text.rotary_emb, head_dim_of(text.config), self._weights.embed, family_of(model).position_axes
        )
        self._slots = Slots(self._weights)
        self.vocab_size = self._weights.embed.shape[0]
        self.device = self._weights.embed.device
        ledger.register(ledger.SAMPLER_WEIGHTS, self, lambda it: it._weights)  # joined copies of small matrices
        ledger.register(ledger.SAMPLER_CACHES, self, lambda it: it._slots)

    def refresh(self, always: bool = False) -> bool:
        """Read the weights again where they have changed, or `always`."""
        family = family_of(self._model)
        now = fingerprint(self._model)
        changed = always or now is None or now != self._read
        if changed:
            self._weights = family.read(self._model)
            self._read = now
        return changed

    def prefill(
        self, prompts: Sequence[Sequence[int]], pasts: Sequence[Past[PackedCache]] | None = None
    ) -> tuple[Tensor, PackedCache]:
        """Run one packed pass over the prompts."""
        device = self._weights.embed.device
        fed = [len(p) for p in prompts]
        before = [0] * len(fed) if pasts is None else [cache.lengths[pick] for cache, pick in pasts]
        ids = torch.tensor([t for p in prompts for t in p], device=device)
        positions = torch.cat([torch.arange(b, b + n) for b, n in zip(before, fed, strict=True)]).to(device)
        turn = self._rotary.take(positions, max(map(sum, zip(before, fed, strict=True))))
        mixers = PackedCache.of(fed, device) if pasts is None else Continued(fed, pasts, device)
        h = hidden_states(self._weights, ids, turn, mixers)
        ends = torch.tensor(list(accumulate(fed)), device=device) - 1
        (logits,) = self._weights.head(h[ends])
        return logits, mixers.cache if isinstance(mixers, Continued) else mixers

    def score(self, ids: Sequence[int], chunk: int) -> Iterator[Tensor]:
        """Run one pass over the tokens, and the head over a chunk of them at a time."""
        tokens, places = torch.tensor(ids, device=self.device), torch.arange(len(ids), device=self.device)
        mixers = PackedCache.of([len(ids)], self.device)
        h = hidden_states(self._weights, tokens, self._rotary.take(places, len(ids)), mixers)
        for part in h.split(chunk):
            yield from self._weights.head(part)

    def experts(self, pick: int, cache: PackedCache | None = None) -> None:
        """Return None: the families here have no experts."""

    def keep(self, slots: Sequence[int]) -> PackedCache:
        """See `Decoder`."""
        return self._slots.keep(slots)

    def size(self, lengths: Sequence[int]) -> int:
        """See `Decoder`."""
        return sum(lengths) + len(lengths) * self._slots.state_tokens

    def place(self, cache: PackedCache, picks: Sequence[int], slots: Sequence[int]) -> None:
        """See `Decoder`."""
        self._slots.place(cache, picks, slots)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Decoder`."""
        self._slots.move(sources, targets)

    def release(self, slot: int) -> None:
        """See `Decoder`."""
        self._slots.lengths[slot] = 0

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder`."""
        n = tokens.shape[0]
        self._slots.begin(n)
        positions = self._slots.positions[:n]
        turn = self._rotary.take(positions, max(self._slots.lengths[:n]) + 1)
        (logits,) = self._weights.head(hidden_states(self._weights, tokens, turn, self._slots))
        self._slots.end()
        return logits

    def clear(self) -> None:
        """See `Decoder`."""
        self._slots = Slots(self._weights)
