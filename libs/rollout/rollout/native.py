"""Generation over a plain Hugging Face module: left-padded rows, its own cache, no second model code.

Equal prompts of a batch (the group of a policy-gradient step) are prefilled once and their cache rows copied; rows
that have ended leave the batch. Prompts are padded on the left with an attention mask, which is exact for attention
and for the gated delta net (padded inputs are zeroed before its convolution and state).
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollout.engine import Completion, PauseMode, Sampling, StopReason
from rollout.queue import BatchingQueue
from rollout.sampling import SamplingRows, choose, draw_uniforms
from rollout.sync import Piece, WeightAssembler, assemble


@dataclass(frozen=True)
class _Request:
    """One row's work: where it came from, what to sample after, how."""

    index: int
    prompt: tuple[int, ...]
    sampling: Sampling


class NativeEngine:
    """Samples from a causal language model of transformers (any module with its `forward` and `config`).

    `max_batch` bounds the rows of one forward pass, `max_length` (default: the config's max_position_embeddings) the
    prompt plus completion. `generate_batch` is the synchronous core; the async methods are the RolloutEngine protocol.
    The module is used as it is: nothing is patched; it is put in eval mode for the length of a call.
    """

    def __init__(
        self,
        model: nn.Module,
        pad_token_id: int = 0,
        max_batch: int = 512,
        max_length: int | None = None,
        seed: int = 0,
        version: int = 0,
        compact_below: float = 0.75,
    ) -> None:
        if max_batch < 1:
            raise ValueError(f"max_batch must be at least 1, got {max_batch}")
        if not 0 <= compact_below <= 1:
            raise ValueError(f"compact_below is a share of rows in [0, 1], got {compact_below}")
        config = model.config.get_text_config()  # type: ignore[operator, union-attr]
        self._model = model
        self._config = config
        self._pad = pad_token_id
        self._max_batch = max_batch
        self._max_length = max_length or int(config.max_position_embeddings)
        self._generator = torch.Generator().manual_seed(seed)
        self._version = version
        self._compact_below = compact_below
        self._lock = threading.Lock()
        self._abort = threading.Event()
        self._queue = BatchingQueue(self._run, max_batch)
        self.decode_steps = 0
        self.prefilled_tokens = 0

    @property
    def version(self) -> int:
        """The number of the weights in use."""
        return self._version

    # -- the asynchronous face -------------------------------------------------------------------------------------

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, media: Mapping[str, Any] | None = None
    ) -> Completion:
        """Sample one completion. Calls that are waiting at the same time run as one batch."""
        if media:
            raise ValueError("the native engine takes text alone; leave media out")
        self._check(prompt_ids, sampling)
        return await self._queue.submit((tuple(prompt_ids), sampling))

    async def update_weights(self, version: int, pieces: Iterable[Piece]) -> None:
        """Replace the weights between two batches; see `load_weights`."""
        async with self._queue.exclusive():
            self.load_weights(version, pieces)

    async def pause(self, mode: PauseMode = "finish") -> None:
        """Hold back waiting requests and return once nothing runs. "abort" ends the running batch at its next token:
        its completions come back with what they have and stop_reason "abort".
        """
        if mode not in ("finish", "abort"):
            raise ValueError(f'pause mode is "finish" or "abort", got {mode!r}')
        if mode == "abort":
            self._abort.set()
        await self._queue.pause()
        self._abort.clear()

    async def resume(self) -> None:
        """Run the requests that waited, and new ones."""
        self._queue.resume()

    def _run(self, requests: Sequence[tuple[tuple[int, ...], Sampling]]) -> list[Completion]:
        return self.generate_batch([r[0] for r in requests], [r[1] for r in requests])

    # -- weights ---------------------------------------------------------------------------------------------------

    def load_weights(self, version: int, pieces: Iterable[Piece]) -> None:
        """Replace every parameter. All or nothing: pieces are collected and checked first (one more copy of the weights
        in memory), and a ValueError about any of them leaves the old weights and version in place. Persistent buffers
        may be left out; of tied weights one name is enough.
        """
        if version <= self._version:
            raise ValueError(f"weights {version} are not newer than the current {self._version}; count upwards")
        targets, aliases, optional = _named_tensors(self._model)
        whole = assemble(WeightAssembler(targets, aliases, optional), pieces)
        with self._lock, torch.no_grad():
            for name, value in whole.items():
                targets[name].copy_(value)
            self._version = version

    # -- the synchronous core --------------------------------------------------------------------------------------

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]
    ) -> list[Completion]:
        """One completion a prompt, in order. `sampling` is one for all or one each."""
        settings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(settings) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(settings)} sampling settings; give one, or one each")
        for prompt, s in zip(prompts, settings, strict=True):
            self._check(prompt, s)
        if not prompts:
            return []
        requests = [_Request(i, tuple(p), s) for i, (p, s) in enumerate(zip(prompts, settings, strict=True))]
        requests.sort(
            key=lambda r: (len(r.prompt), r.prompt)
        )  # like lengths together: less padding, groups side by side
        answers: list[Completion | None] = [None] * len(requests)
        training = self._model.training
        with self._lock, torch.no_grad():
            uniforms = draw_uniforms(settings, self._generator)
            self._model.eval()
            try:
                for at in range(0, len(requests), self._max_batch):
                    part = requests[at : at + self._max_batch]
                    for request, completion in zip(part, self._decode(part, uniforms), strict=True):
                        answers[request.index] = completion
            finally:
                self._model.train(training)
        return [a for a in answers if a is not None]

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        if not prompt:
            raise ValueError("an empty prompt cannot be continued; give at least one token")
        if len(prompt) + sampling.max_new_tokens > self._max_length:
            raise ValueError(
                f"prompt of {len(prompt)} tokens + max_new_tokens={sampling.max_new_tokens} is over "
                f"max_length={self._max_length}; shorten one or raise max_length"
            )

    def _prefill(self, part: Sequence[_Request]) -> tuple[Tensor, Any, Tensor, Tensor]:
        """Logits (n, V) after each row's prompt, the cache, the mask (n, L) and the next positions (n, 1)."""
        from transformers import DynamicCache

        distinct = list(dict.fromkeys(r.prompt for r in part))
        place = {p: i for i, p in enumerate(distinct)}
        longest = max(map(len, distinct))
        device = next(self._model.parameters()).device
        ids = torch.tensor([[self._pad] * (longest - len(p)) + list(p) for p in distinct], device=device)
        starts = torch.tensor([[longest - len(p)] for p in distinct], device=device)
        columns = torch.arange(longest, device=device)
        mask = columns >= starts
        cache = DynamicCache(config=self._config)
        logits = self._model(
            input_ids=ids,
            attention_mask=mask.long(),
            position_ids=(columns - starts).clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        self.prefilled_tokens += ids.numel()
        positions = longest - starts
        if len(distinct) < len(part):
            rows = torch.tensor([place[r.prompt] for r in part], device=device)
            cache.reorder_cache(rows)
            logits, mask, positions = logits[rows], mask[rows], positions[rows]
        return logits, cache, mask, positions

    def _decode(self, part: Sequence[_Request], uniforms: Tensor) -> list[Completion]:
        logits, cache, mask, positions = self._prefill(part)
        device = logits.device
        n = len(part)
        settings = [r.sampling for r in part]
        columns = SamplingRows.build(settings, uniforms[[r.index for r in part]], device)
        stops = _stop_table(settings, device)
        limits = torch.tensor([s.max_new_tokens for s in settings], device=device)
        width = int(limits.max())
        ids = torch.zeros(n, width, dtype=torch.long, device=device)
        log_probs = torch.zeros(n, width, device=device)
        stopped = torch.zeros(n, dtype=torch.bool, device=device)
        lengths = torch.zeros(n, dtype=torch.long, device=device)
        rows = torch.arange(n, device=device)  # the row of `part` that each row of the batch works for
        alive = torch.ones(n, dtype=torch.bool, device=device)
        for step in range(width):
            tokens, chosen = choose(logits, columns, step)
            at = rows[alive]
            ids[at, step], log_probs[at, step] = tokens[alive], chosen[alive]
            lengths[at] = step + 1
            hit = alive & (tokens[:, None] == stops[rows]).any(dim=-1)
            stopped[rows[hit]] = True
            alive = alive & ~hit & (limits[rows] > step + 1)
            count = int(alive.sum())
            if count == 0 or self._abort.is_set():
                break
            if count < self._compact_below * len(rows):
                keep = alive.nonzero().squeeze(-1)
                cache.reorder_cache(keep)
                columns = columns.select(keep)
                rows, tokens, mask, positions, alive = (
                    rows[keep],
                    tokens[keep],
                    mask[keep],
                    positions[keep],
                    alive[keep],
                )
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            logits = self._model(
                input_ids=tokens[:, None],
                attention_mask=mask.long(),
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            ).logits[:, -1]
            positions = positions + 1
            self.decode_steps += 1
        if not bool(torch.isfinite(log_probs).all()):
            raise ValueError("the model's logits are not finite; its weights or its input are broken")
        return self._completions(ids, log_probs, lengths, stopped, limits)

    def _completions(
        self, ids: Tensor, log_probs: Tensor, lengths: Tensor, stopped: Tensor, limits: Tensor
    ) -> list[Completion]:
        answers = []
        for tokens, probs, length, stop, limit in zip(
            ids.tolist(), log_probs.tolist(), lengths.tolist(), stopped.tolist(), limits.tolist(), strict=True
        ):
            reason: StopReason = "stop" if stop else "length" if length == limit else "abort"
            answers.append(Completion(tuple(tokens[:length]), tuple(probs[:length]), reason, (self._version,) * length))
        return answers


def _stop_table(settings: Sequence[Sampling], device: torch.device) -> Tensor:
    """Stop tokens of each row, (n, most), filled up with -1."""
    most = max(1, *(len(s.stop_token_ids) for s in settings))
    return torch.tensor([[*s.stop_token_ids, *[-1] * (most - len(s.stop_token_ids))] for s in settings], device=device)


def _named_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], list[str]]:
    """Tensors to load by name, other names of tied ones, and the names that may be left out (persistent buffers)."""
    targets: dict[str, Tensor] = dict(model.named_parameters())
    aliases: dict[str, str] = {}
    first = {id(p): name for name, p in targets.items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in targets:
            aliases[name] = first[id(parameter)]
    optional = []
    state = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in state:
            targets[name] = buffer
            optional.append(name)
    return targets, aliases, optional
