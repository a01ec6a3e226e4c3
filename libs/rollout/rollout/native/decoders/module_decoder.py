"""Any causal language model of transformers as a decoder: its own forward pass over rows padded on the left.

All rows end at the same column, so a step appends one column to all. Left padding with an attention mask is exact for
attention and for the gated delta net (padded inputs are zeroed before its convolution and state).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from rollout.experts import RoutedExperts
from rollout.native.decoders.decoder import Past
from rollout.native.decoders.fingerprint import fingerprint
from rollout.native.decoders.media import SeenPrompt, seen_inputs
from rollout.native.decoders.module_rows import KINDS, Rows, joined
from rollout.native.decoders.routers import Routers
from seqpack.memory import ledger


class ModuleDecoder:
    """A `Decoder` that calls the module; ValueError where its caches have layers that cannot be joined here.

    `routers`: those of the module, where the experts of tokens are to be recorded.
    """

    def __init__(self, model: nn.Module, pad_token_id: int = 0, routers: Routers | None = None) -> None:
        self._model = model
        self._routers = routers
        self._config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        self._pad = pad_token_id
        self._rows: Rows | None = None
        self._units: tuple[int, int] | None = None
        self._columns: int | None = None
        self._read: object = None
        ledger.register(ledger.SAMPLER_CACHES, self, lambda it: it._rows)
        self.vocab_size = int(self._config.vocab_size)
        self.device = next(model.parameters()).device
        for layer in DynamicCache(config=self._config).layers:
            if type(layer) not in KINDS:
                raise ValueError(
                    f"rows of a {type(layer).__name__} cannot be joined: add it to native/decoders/module_rows.py, "
                    "with a test"
                )

    def refresh(self, always: bool = False) -> bool:
        """Return whether the module's weights have changed; its forward pass reads them itself."""
        before, self._read = self._read, fingerprint(self._model)
        return always or self._read is None or self._read != before

    def prefill(
        self, prompts: Sequence[Sequence[int]], pasts: Sequence[Past[Rows]] | None = None
    ) -> tuple[Tensor, Rows]:
        """Run one padded pass over the prompts; with pasts, one a length, as padding would stand between the two."""
        if pasts is None:
            return self._prefill(prompts)
        lengths: dict[int, list[int]] = {}
        for i, prompt in enumerate(prompts):
            lengths.setdefault(len(prompt), []).append(i)
        parts = [self._continue([prompts[i] for i in p], [pasts[i] for i in p]) for p in lengths.values()]
        order = torch.tensor([i for part in lengths.values() for i in part], device=self.device).argsort()
        return torch.cat([logits for logits, _ in parts])[order], joined([rows for _, rows in parts]).pick(order)

    def _continue(self, prompts: Sequence[Sequence[int]], pasts: Sequence[Past[Rows]]) -> tuple[Tensor, Rows]:
        """Run one pass over prompts of one length after their pasts."""
        rows = joined([cache.pick(torch.tensor([pick], device=self.device)) for cache, pick in pasts])
        ids = torch.tensor([list(p) for p in prompts], device=self.device)
        rows.mask = torch.cat([rows.mask, torch.ones_like(ids, dtype=torch.bool)], dim=1)
        logits = self._forward(ids, rows.positions + torch.arange(ids.shape[1], device=self.device), rows)
        rows.positions = rows.positions + ids.shape[1]
        return logits, rows

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Rows]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[self._pad] * (longest - len(p)) + list(p) for p in prompts], device=self.device)
        starts = torch.tensor([[longest - len(p)] for p in prompts], device=self.device)
        columns = torch.arange(longest, device=self.device)
        rows = Rows(DynamicCache(config=self._config), columns >= starts, longest - starts)
        if any(isinstance(prompt, SeenPrompt) for prompt in prompts):
            seen = seen_inputs(self._model, prompts)
            rows.positions = rows.positions + torch.tensor(seen.ahead, device=self.device)[:, None]
            embeddings = seen.embeddings.new_zeros(*ids.shape, seen.embeddings.shape[-1])
            positions = ids.new_zeros(3, *ids.shape)
            embeddings[rows.mask], positions[:, rows.mask] = seen.embeddings, seen.positions
            return self._forward(ids, positions, rows, embeddings), rows
        return self._forward(ids, (columns - starts).clamp(min=0), rows), rows

    def score(self, ids: Sequence[int], chunk: int) -> Iterator[Tensor]:
        """Run a pass over each chunk of the tokens, which continues the one before."""
        cache = DynamicCache(config=self._config)
        tokens, places = torch.tensor(ids, device=self.device), torch.arange(len(ids), device=self.device)
        for part in places.split(chunk):
            yield self._model(
                input_ids=tokens[None, part],
                attention_mask=torch.ones_like(places[None, : int(part[-1]) + 1]),
                position_ids=part[None],
                past_key_values=cache,
                use_cache=True,
            ).logits[0]

    def experts(self, pick: int, cache: Rows | None = None) -> RoutedExperts | None:
        """See `Decoder`."""
        rows = self._rows if cache is None else cache
        if rows is None or rows.experts is None:
            return None
        return RoutedExperts.of(rows.experts[pick, rows.mask[pick]])

    def place(self, cache: Rows, picks: Sequence[int], slots: Sequence[int]) -> None:
        """See `Decoder`."""
        picked = cache.pick(torch.tensor(picks, device=self.device))
        if self._rows is None:  # the slots between these may be of the admission's next prefill
            self._rows = cache.pick(torch.tensor([], dtype=torch.int64, device=self.device))
        self._rows.put(picked, slots)

    def keep(self, slots: Sequence[int]) -> Rows:
        """See `Decoder`."""
        assert self._rows is not None
        rows = self._rows.pick(torch.tensor(slots, device=self.device))
        rows.keep(len(slots))
        return rows

    def size(self, lengths: Sequence[int]) -> int:
        """Return the memory of rows padded to the longest; see `Decoder`."""
        return len(lengths) * (max(lengths) + self._sizes()[0])

    @property
    def token_bytes(self) -> int:
        """See `Decoder`."""
        return self._sizes()[1]

    def slot_bytes(self, rows: int, length: int) -> int:
        """Return the bytes of the rows twice, as those that join are copied; see `Decoder`."""
        state, token = self._sizes()
        return 2 * rows * (length + state) * token

    def reserve(self, rows: int, length: int) -> None:
        """Bound the columns; see `Decoder`."""
        self._columns = length
        if self._rows is not None and (self._rows.mask.shape[0] > rows or self._rows.mask.shape[1] > length):
            self._rows.keep(rows)

    def _sizes(self) -> tuple[int, int]:
        """Return the tokens that take the memory of a row's states, and the bytes of a token; of the first cache that
        there is, or of one token that is read for it."""
        if self._units is None:
            rows = self._prefill([[self._pad]])[1] if self._rows is None else self._rows
            self._units = rows.state_tokens, rows.token_bytes
        return self._units

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `Decoder`."""
        assert self._rows is not None
        self._rows.put(self._rows.pick(torch.tensor(sources, device=self.device)), targets)

    def release(self, slot: int) -> None:
        """Clear the mask of the slot's row, which then sees only what it is fed from here on."""
        if self._rows is not None:
            self._rows.mask[slot] = False

    def step(self, tokens: Tensor) -> Tensor:
        """See `Decoder`."""
        assert self._rows is not None
        rows, n = self._rows, tokens.shape[0]
        if rows.mask.shape[0] > n or (self._columns is not None and rows.mask.shape[1] >= self._columns):
            rows.keep(n)
        rows.mask = torch.cat([rows.mask, rows.mask.new_ones(n, 1)], dim=1)
        logits = self._forward(tokens[:, None], rows.positions, rows)
        rows.positions = rows.positions + 1
        return logits

    def clear(self) -> None:
        """See `Decoder`."""
        self._rows = None

    def _forward(self, ids: Tensor, positions: Tensor, rows: Rows, embeddings: Tensor | None = None) -> Tensor:
        """Return logits [n, V] after the last column; `embeddings` [n, L, H], where given, replace those of the ids."""
        if self._routers is None:
            return self._logits(ids, positions, rows, embeddings)
        with self._routers.noted() as chosen:
            logits = self._logits(ids, positions, rows, embeddings)
        new = self._routers.table(chosen, ids.shape[0])
        rows.experts = new if rows.experts is None else torch.cat([rows.experts, new], dim=1)
        return logits

    def _logits(self, ids: Tensor, positions: Tensor, rows: Rows, embeddings: Tensor | None) -> Tensor:
        result: Tensor = self._model(
            **({"input_ids": ids} if embeddings is None else {"inputs_embeds": embeddings}),
            attention_mask=rows.mask.long(),
            position_ids=positions,
            past_key_values=rows.cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        return result
