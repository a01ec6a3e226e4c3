"""The lean decoder: a module's weights, read by family, with prompts packed and rows in slots."""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from rollout.native.decoders.decoder import Past
from rollout.native.decoders.fingerprint import fingerprint
from rollout.native.decoders.media import SeenPrompt, seen_inputs, text_of
from rollout.native.lean.continuation import Continued
from rollout.native.lean.families import family_of
from rollout.native.lean.forward import hidden_states
from rollout.native.lean.prefill import PackedCache
from rollout.native.lean.rotary import Rotary, head_dim_of, pair_order
from rollout.native.lean.slots import Slots
from seqpack.memory import ledger


class LeanDecoder:
    """A `Decoder` over the models of `families`; ValueError where it would leave something out."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._read: object = None
        self.refresh()
        text = text_of(model)
        head_dim, embed = head_dim_of(text.config), self._weights.embed
        pairs = pair_order(text.rotary_emb, head_dim, embed) is not None
        self._rotary = Rotary(text.rotary_emb, head_dim, embed, family_of(model).position_axes, pairs)
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
        """Run one packed pass over the prompts. Those with images have no pasts."""
        fed = [len(p) for p in prompts]
        mixers: PackedCache | Continued
        if any(isinstance(prompt, SeenPrompt) for prompt in prompts):
            assert pasts is None
            seen = seen_inputs(self._model, prompts)
            h, turn = seen.embeddings, self._rotary.by_axis(seen.positions)
            mixers = PackedCache.of(fed, self.device, seen.ahead)
        else:
            before = [0] * len(fed) if pasts is None else [c.lengths[pick] + c.ahead[pick] for c, pick in pasts]
            h = self._embedded([t for p in prompts for t in p])
            positions = torch.cat([torch.arange(b, b + n) for b, n in zip(before, fed, strict=True)]).to(self.device)
            turn = self._rotary.take(positions, max(map(sum, zip(before, fed, strict=True))))
            mixers = PackedCache.of(fed, self.device) if pasts is None else Continued(fed, pasts, self.device)
        ends = torch.tensor(list(accumulate(fed)), device=self.device) - 1
        (logits,) = self._weights.head(hidden_states(self._weights, h, turn, mixers, ends))
        return logits, mixers.cache if isinstance(mixers, Continued) else mixers

    def score(self, ids: Sequence[int], chunk: int) -> Iterator[Tensor]:
        """Run one pass over the tokens, and the head over a chunk of them at a time."""
        places = torch.arange(len(ids), device=self.device)
        mixers = PackedCache.of([len(ids)], self.device)
        h = hidden_states(self._weights, self._embedded(ids), self._rotary.take(places, len(ids)), mixers)
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

    @property
    def token_bytes(self) -> int:
        """See `Decoder`."""
        return self._slots.token_bytes

    def slot_bytes(self, rows: int, length: int) -> int:
        """See `Decoder`."""
        return self._slots.nbytes(rows, length)

    def reserve(self, rows: int, length: int) -> None:
        """See `Decoder`."""
        self._slots.reserve(rows, length)

    def place(self, cache: PackedCache, picks: Sequence[int], slots: Sequence[int]) -> None:
        """See `Decoder`."""
        self._slots.place(cache, picks, slots)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Decoder`."""
        self._slots.move(sources, targets)

    def release(self, slot: int) -> None:
        """See `Decoder`."""
        self._slots.release(slot)

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder`."""
        self._slots.begin(tokens.shape[0])
        turn = self._rotary.take(self._slots.positions, self._slots.span)
        h = embedding(tokens, self._weights.embed)
        (logits,) = self._weights.head(hidden_states(self._weights, h, turn, self._slots))
        self._slots.end()
        return logits

    def _embedded(self, ids: Sequence[int]) -> Tensor:
        return embedding(torch.tensor(ids, device=self.device), self._weights.embed)

    def clear(self) -> None:
        """See `Decoder`."""
        self._slots = Slots(self._weights)
