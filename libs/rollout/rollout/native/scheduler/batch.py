"""Continuous batching: requests join and leave between any two decode steps.

A step does four things:

1. Admit: waiting requests take free slots, first come first served. Prompts not read yet are prefilled, equal ones
   once, from the end of a cached stream where one is a prefix; each admitted request gets its first token, and those
   that it ends never take a slot.
2. Compact: where too few of the slots below the highest one in use are taken, rows move down into the free ones.
3. Decode: every row is fed its newest token and gets its next.
4. Keep: the state of rows that ended goes into the prefix cache, for prompts that continue them. It is the state after
   all of their tokens but the last, which was never fed. Rows that ran during a weight sync are not cached: their state
   is a mixture.

Between steps every row's newest token has not been fed yet, so no logits wait: a weight sync between two steps changes
the version of the next token of each row and of none before.

Invariants: a request is waiting, or in exactly one slot, or done; done ones got one result; the slots in use are among
the first `max_rows`; the prefix cache was computed by the present weights alone.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rollout.engine import Sampling, StopReason
from rollout.errors import GrammarError, NotFiniteError
from rollout.native.cache.prefill_cache import PrefillCache, PrefillEntry
from rollout.native.cache.prefix_cache import CachedPrefix, PrefixCache, stream_of
from rollout.native.decoders.decoder import Decoder
from rollout.native.decoders.media import followed, shown
from rollout.native.scheduler.grammars import apply_grammars
from rollout.native.scheduler.memory_bound import MemoryBound
from rollout.native.scheduler.penalties import apply_penalties
from rollout.native.scheduler.request import SequenceRequest
from rollout.native.scheduler.sampling import SamplingRows, choose
from rollout.token_scores import CHUNK
from seqpack.memory import ledger


class ContinuousBatch:
    """The requests of one decoder. Not thread-safe: its owner lets one thread in at a time.

    `max_rows` bounds the slots, `prefill_tokens` the prompt tokens of one prefill (a longer prompt has one of its own)
    and of the prefill cache, `keep_tokens` the size of the prefix cache, `memory` the bytes of slots and both caches.
    """

    def __init__(
        self,
        decoder: Decoder[Any],
        max_rows: int,
        prefill_tokens: int,
        compact_below: float,
        version: int,
        keep_tokens: int = 0,
        memory: int | None = None,
    ) -> None:
        self.decoder = decoder
        self._bound = None if memory is None else MemoryBound(decoder, memory)
        self.paused = False
        self.version = version
        self.decode_steps = 0
        self.num_prefill_tokens = 0
        self._max_rows = max_rows
        self._prefill_tokens = prefill_tokens
        self._compact_below = compact_below
        self._device = decoder.device
        self._waiting: deque[SequenceRequest] = deque()
        self._joining: list[SequenceRequest] = []  # between the queue and a slot
        self._rows: list[SequenceRequest | None] = []
        self._columns: SamplingRows | None = None  # of the rows, as `_newest`, until one joins or moves
        self._newest = torch.empty(0, dtype=torch.int64)
        most = (prefill_tokens, keep_tokens)
        cached, kept = most if self._bound is None else map(self._bound.tokens, most)
        self._prefixes: PrefillCache[Any] = PrefillCache(cached)
        self._kept: PrefixCache[Any] = PrefixCache(kept)
        self._leaving: list[tuple[int, SequenceRequest | None]] = []  # slots of rows that ended, and what to cache
        self._epoch = 0
        self._most_held = 0  # tokens of both caches when they were observed
        ledger.register(ledger.SAMPLER_CACHES, self, lambda it: [it._prefixes.caches, it._kept.caches, it._columns])

    @property
    def running(self) -> list[SequenceRequest]:
        """The requests in slots."""
        return [r for r in self._rows if r is not None]

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step has anything to do."""
        return bool(self._rows) or (bool(self._waiting) and not self.paused)

    def check(self, prompt: int, sampling: Sampling) -> None:
        """Raise ValueError with the numbers where a request with a prompt of so many tokens has no room even alone."""
        if self._bound is not None:
            self._bound.check(prompt, sampling)

    def add(self, request: SequenceRequest) -> None:
        """Append a request to those that wait for a slot."""
        self._waiting.append(request)

    def extend(self, requests: Sequence[SequenceRequest]) -> None:
        """Append requests, in order, to those that wait for a slot."""
        self._waiting.extend(requests)

    def end(self, request: SequenceRequest, outcome: StopReason | BaseException) -> None:
        """Finish a request with the tokens so far and free its slot; do nothing where it is done."""
        if request.done:
            return
        if request.slot is None:
            self._waiting.remove(request)
        else:
            self._free(request)
        request.finish(outcome)

    def drop_all(self, error: BaseException) -> None:
        """Fail all requests with an error, and clear everything."""
        dropped = dict.fromkeys([*self.running, *self._joining, *self._waiting])
        self._leaving = []
        self._kept.clear()
        self._waiting.clear()
        self._joining = []
        self._rows.clear()
        self._columns = None
        self._prefixes.clear()
        self.decoder.clear()
        for request in dropped:
            request.slot = None
            if not request.done:
                request.finish(error)

    def swap(self, version: int, recompute: bool) -> None:
        """Record new weights: clear the prefill and prefix caches, and keep or recompute the rows' caches."""
        self.version = version
        self._epoch += 1
        self._cache_ended()
        self.decoder.refresh(always=True)
        self._prefixes.clear()
        self._kept.clear()
        if recompute and self.running:
            rows = self.running
            most, sizes = self._prefill_tokens, [len(r.prompt) + len(r.ids) - 1 for r in rows]
            if self._bound is not None:
                sizes = [self.decoder.size([n]) for n in sizes]
                most = min(most, self._bound.room(self._prefixes, len(rows)))
            for part in _parts(rows, sizes, most):
                _, cache = self._prefill([followed(r.prompt, r.ids[:-1]) for r in part])
                slots = [r.slot for r in part if r.slot is not None]
                for request, slot in zip(part, slots, strict=True):
                    request.note(self.decoder.experts(slot))  # of the weights that made its tokens
                self.decoder.place(cache, list(range(len(part))), slots)
            for row in rows:
                row.epoch = self._epoch

    def continues(self, request: SequenceRequest) -> bool:
        """Return whether a request's prompt continues a cached stream."""
        return not shown(request.prompt) and self._kept.longest(request.prompt) is not None

    def score(self, ids: Sequence[int]) -> Iterator[Tensor]:
        """Yield the logits after each of the tokens, a chunk at a time."""
        if not self._rows and self.decoder.refresh():
            self._kept.clear()
        return self.decoder.score(ids, CHUNK) if ids else iter(())

    def forget(self) -> None:
        """Clear the prefix cache."""
        self._kept.clear()

    def step(self) -> None:
        """Admit, compact, decode, keep. Without gradients; after an exception call `drop_all`.

        A batch that has run empty is reset by the step's end, before any result is delivered: the next request must not
        depend on when it comes.
        """
        self._cache_ended()
        if not self._rows and self.decoder.refresh():
            self._kept.clear()  # its owner changed the module while nothing ran
        while not self.paused and (count := self._admitted()):
            self._admit(count)
        self._compact()
        if self._rows:
            self._decode()
            self._cache_ended()
            self._trim()
        if not self._rows and not self._waiting:
            held = self._prefixes.tokens + self._kept.tokens
            ledger.observe(self, ledger.SAMPLER_CACHES, again=held > self._most_held)
            self._most_held = max(self._most_held, held)
            ledger.observe(self.decoder, ledger.SAMPLER_CACHES, again=True)
            self._prefixes.clear()
            self.decoder.clear()
            if self._bound is not None:
                self._bound.release()

    # -- admission -------------------------------------------------------------------------------------------------

    def _admitted(self) -> int:
        """Return how many of the requests that wait may begin: as many as have a slot, and memory where it is bound."""
        free = min(self._max_rows - len(self.running), len(self._waiting))
        if self._bound is None or not free:
            return free
        self._trim()
        return self._bound.admitted(self._waiting, free, self.running, len(self._rows), self._prefixes, self._kept)

    def _admit(self, count: int) -> None:
        """Let so many requests of the queue begin; a first token may free some of their slots again."""
        joining = self._joining = [self._waiting.popleft() for _ in range(count)]
        known = self._read(joining)
        columns = SamplingRows.build([r.sampling for r in joining], self._device)
        logits = torch.stack([k.logits for k in known])
        tokens, log_probs = self._choose(logits, columns, joining)
        staying = []
        for request, place, token, log_prob in zip(joining, known, tokens.tolist(), log_probs.tolist(), strict=True):
            request.note(self.decoder.experts(place.past.pick, place.past.cache))
            if self._take(request, token, log_prob):
                staying.append((request, place))
        self._assign_slots(staying)
        self._joining = []

    def _read(self, requests: Sequence[SequenceRequest]) -> list[PrefillEntry[Any]]:
        """Return the prefilled prompts of the requests, after prefilling the unknown ones."""
        prefills = {p: self._prefixes.get(p) for p in dict.fromkeys(r.prompt for r in requests)}
        unread = sorted((p for p, known in prefills.items() if known is None), key=len)
        cached = {p: None if shown(p) else self._kept.longest(p) for p in unread}
        for whole in (True, False):
            prompts = [p for p in unread if (cached[p] is None) == whole]
            for part in _parts(prompts, [len(p) for p in prompts], self._prefill_tokens):
                logits, cache = self._prefill(part, [k for p in part if (k := cached[p]) is not None])
                self._prefixes.add(part, logits, cache)
                prefills.update({p: self._prefixes.get(p) for p in part})
        known = [prefills[r.prompt] for r in requests]
        assert all(k is not None for k in known)
        return [k for k in known if k is not None]

    def _prefill(
        self, prompts: Sequence[tuple[int, ...]], cached: Sequence[CachedPrefix[Any]] = ()
    ) -> tuple[Tensor, Any]:
        """Read prompts, from their beginning or all of them from the end of a cached stream."""
        if not cached:
            self.num_prefill_tokens += sum(map(len, prompts))
            return self.decoder.prefill(prompts)
        fed = [p[k.length :] for p, k in zip(prompts, cached, strict=True)]
        self.num_prefill_tokens += sum(map(len, fed))
        return self.decoder.prefill(fed, [k.past for k in cached])

    def _assign_slots(self, staying: Sequence[tuple[SequenceRequest, PrefillEntry[Any]]]) -> None:
        """Place requests in the lowest free slots and copy their caches there, a prefill at a time."""
        free = (i for i, row in enumerate([*self._rows, *[None] * len(staying)]) if row is None)
        by_cache: dict[int, tuple[Any, list[int], list[int]]] = {}
        for request, known in staying:
            request.slot, request.epoch = next(free), self._epoch
            cache, pick = known.past
            _, picks, slots = by_cache.setdefault(id(cache), (cache, [], []))
            picks.append(pick)
            slots.append(request.slot)
        for cache, picks, slots in by_cache.values():
            self.decoder.place(cache, picks, slots)
        for request, _ in staying:
            assert request.slot is not None
            if request.slot == len(self._rows):
                self._rows.append(None)
            self._rows[request.slot] = request
        self._columns = None

    # -- decoding --------------------------------------------------------------------------------------------------

    def _compact(self) -> None:
        """Move the highest rows into the free slots below them, once enough slots are free."""
        self._trim()
        count = len(self.running)
        if count == len(self._rows) or count >= self._compact_below * len(self._rows):
            return
        targets = [i for i, row in enumerate(self._rows[:count]) if row is None]
        sources = [i for i, row in enumerate(self._rows) if row is not None and i >= count]
        self.decoder.move(sources, targets)
        for source, target in zip(sources, targets, strict=True):
            row = self._rows[target] = self._rows[source]
            assert row is not None
            row.slot = target
        del self._rows[count:]
        self._columns = None

    def _trim(self) -> None:
        """Drop free slots above the highest one in use."""
        while self._rows and self._rows[-1] is None:
            self._rows.pop()
            self._columns = None

    def _decode(self) -> None:
        rows = list(self._rows)
        if self._columns is None:
            like = self.running[0].sampling  # unused rows are sampled with any settings, to keep the shape
            self._columns = SamplingRows.build([like if r is None else r.sampling for r in rows], self._device)
            self._newest = torch.tensor([0 if r is None else r.ids[-1] for r in rows], device=self._device)
        logits = self.decoder.step(self._newest)
        self.decode_steps += 1
        self._newest, log_probs = self._choose(logits, self._columns, rows)
        values, version = log_probs.tolist(), self.version
        plain = math.isfinite(sum(values)) and not self._columns.structured
        for request, token, log_prob in zip(rows, self._newest.tolist(), values, strict=True):
            if request is None:
                continue
            if not plain:
                self._take(request, token, log_prob)
            elif (end := request.take(token, log_prob, version)) is not None:
                self._leave(request, end)

    def _choose(
        self, logits: Tensor, columns: SamplingRows, rows: Sequence[SequenceRequest | None]
    ) -> tuple[Tensor, Tensor]:
        """Choose a token for each row; return the tokens and their log-probs."""
        logits = apply_grammars(logits, rows) if columns.structured else logits
        logits = apply_penalties(logits, rows) if columns.penalizes else logits
        return choose(logits, columns, None if columns.all_greedy else self._uniforms(rows))

    def _uniforms(self, rows: Sequence[SequenceRequest | None]) -> Tensor:
        drawn = [0.0 if r is None else next(r.uniforms) for r in rows]
        return torch.tensor(drawn, dtype=torch.float64, device=self._device)[:, None]

    def _take(self, request: SequenceRequest, token: int, log_prob: float) -> bool:
        """Append a sampled token; return whether the request goes on."""
        end: StopReason | GrammarError | NotFiniteError | None
        if request.matcher is not None and (why := request.matcher.get_error()):
            end = GrammarError(f"the grammar of a structured output gave up: {why}")
        elif math.isfinite(log_prob):
            end = request.take(token, log_prob, self.version)
        else:
            end = NotFiniteError("the model's logits are not finite; its weights or its input are broken")
        if end is not None:
            self._leave(request, end)
        return end is None

    def _leave(self, request: SequenceRequest, end: StopReason | GrammarError | NotFiniteError) -> None:
        self._free(request, keep=not isinstance(end, NotFiniteError))
        request.finish(end)

    # -- what is kept ----------------------------------------------------------------------------------------------

    def _free(self, request: SequenceRequest, keep: bool = True) -> None:
        """Take a request out of its slot, whose state stays until `_cache_ended`."""
        if request.slot is not None:
            request.note(self.decoder.experts(request.slot))
            self._rows[request.slot] = None
            self._leaving.append((request.slot, request if keep else None))
            request.slot = None

    def _cache_ended(self) -> None:
        """Keep the state of the rows that ended since the last step in the prefix cache, and release their slots."""
        if not self._leaving:
            return
        leaving, self._leaving = self._leaving, []
        streams: dict[bytes, tuple[int, int]] = {}  # to slot and length
        for slot, request in leaving:
            if request is not None and shown(request.prompt):
                continue  # the cache is keyed by tokens, which do not identify images
            if request is not None and request.epoch == self._epoch and self._kept.max_tokens:
                tokens = (*request.prompt, *request.ids[:-1])
                stream = stream_of(tokens)
                if not self._kept.known(stream):
                    streams.setdefault(stream, (slot, len(tokens)))
        most = self._kept.max_tokens
        if self._bound is not None:
            most = min(most, self._bound.room(self._prefixes, len(self._kept) + len(streams)))
        while streams and self.decoder.size([n for _, n in streams.values()]) > most:
            streams.popitem()
        if streams:
            slots, lengths = zip(*streams.values(), strict=True)
            size = self.decoder.size(lengths)
            self._kept.shrink(most - size)
            self._kept.add(list(streams), self.decoder.keep(slots), size)
        for slot, _ in leaving:
            self.decoder.release(slot)


def _parts(items: Sequence[Any], sizes: Sequence[int], most: int) -> Iterator[Sequence[Any]]:
    """Cut items, in order, into parts of at most `most` together; a larger item is a part of its own."""
    begin, total = 0, 0
    for i, size in enumerate(sizes):
        if i > begin and total + size > most:
            yield items[begin:i]
            begin, total = i, 0
        total += size
    if begin < len(items):
        yield items[begin:]
