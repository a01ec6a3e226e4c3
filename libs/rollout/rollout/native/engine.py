"""The native engine: continuous batching over a plain Hugging Face module in this process.

The holder of a lock owns the batch (`rollout.native.scheduler.batch`), one decode step at a time: the decoding thread,
which works while there are async requests, a caller of `generate_batch`, or a weight sync. Event loops never wait for
the lock: they post jobs, which run between two steps.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from rollout.extras import missing_extra_message

try:
    from transformers import PreTrainedTokenizerBase
except ImportError as error:
    raise ImportError(missing_extra_message("the native engine needs transformers", "native")) from error

from rollout.capability import NATIVE, feature_of
from rollout.config import KEEP_TOKENS, Admission, DecoderChoice, OnCommit
from rollout.engine import Completion, Load, OnTokens, PauseMode, Sampling, StopReason, check_request
from rollout.length_limit import longest_of
from rollout.native.choose_decoder import decoder_of
from rollout.native.decoders.media import SeenPrompt, SeenPrompts
from rollout.native.module_weights import named_tensors, stage
from rollout.native.scheduler.batch import ContinuousBatch
from rollout.native.scheduler.decode_thread import DecodeThread
from rollout.native.scheduler.fair_lock import FairLock
from rollout.native.scheduler.gang_scheduling import GangScheduler
from rollout.native.scheduler.grammars import Grammars
from rollout.native.scheduler.request import SequenceRequest, seeds_of
from rollout.native.scheduler.result_delivery import ResultDelivery
from rollout.native.settings import check_settings
from rollout.open_requests import OpenRequests, check_pause, settle
from rollout.sync.manifest import Manifest
from rollout.sync.pieces import Bucket, Piece
from rollout.sync.staging import WeightStaging
from rollout.token_scores import TokenScores, check_scored, scores_of
from seqpack.capability import Supported, Unsupported
from seqpack.renamed import renamed


class NativeEngine:
    """The engine for a causal language model of transformers (any module with its `forward` and `config`).

    Requests join and leave between any two decode steps. `generate_batch` is synchronous. The module is not patched.

    Args:
        model: the module; it is put in eval mode for the length of a step.
        pad_token_id: what short prompts are padded with where the module's own forward runs.
        max_batch: rows that decode together.
        max_length: prompt plus completion; the config's max_position_embeddings where None (`rollout.length_limit`).
        seed: seed of the engine's generator, which seeds the requests that bring none.
        version: the version of the module's weights.
        compact_below: rows are moved together when less than this share of the slots is in use.
        prefill_tokens: prompt tokens of one forward pass, and of the prefill cache while anything runs.
        decoder: "lean" reads the module's weights in a forward pass of its own (Qwen3.5, Qwen3, Qwen2, Llama,
            Mistral), "module" calls the module's; "auto" takes the first that can.
        on_commit: what a weight sync does to the caches of running rows. "keep" keeps them (log-probs of later tokens
            then differ from a teacher-forced pass of the new weights); "recompute" reads prompt and tokens again.
        admit: when an async request may begin. "any_step": beside whatever runs. "rounds": together with all requests
            that came while the last round ran, once that is done and every running episode has sent its request
            (`rollout.native.scheduler.gang_scheduling`); then equal runs give equal bits whatever threads do.
        keep_tokens: size of the prefix cache in tokens. It holds states of finished requests: a prompt that continues
            all tokens of one (the next turn of a conversation) is read from there. Least recently used ones are dropped
            first, and all of them when the weights change or no prompt of a round continues any. A delta net's state
            counts as the tokens whose keys and values take as much. 0: no cache.
        kv_cache_memory_bytes: bytes of all caches, for which requests wait (`MemoryBound`); None: rows alone are bound.
        routed_experts: completions have the experts of their tokens (`rollout.experts`); ValueError without routers.
        tokenizer: the model's, a fast one, for structured outputs alone.
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
        prefill_tokens: int = 16384,
        decoder: DecoderChoice = "auto",
        on_commit: OnCommit = "keep",
        admit: Admission = "any_step",
        keep_tokens: int = KEEP_TOKENS,
        kv_cache_memory_bytes: int | None = None,
        routed_experts: bool = False,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        check_settings(max_batch, prefill_tokens, keep_tokens, compact_below, on_commit, admit, kv_cache_memory_bytes)
        config = model.config.get_text_config()  # type: ignore[operator, union-attr]
        self._model = model
        self._seen = SeenPrompts(model)
        self._max_length = longest_of(config.to_dict(), max_length)
        self._generator = torch.Generator().manual_seed(seed)
        self._on_commit = on_commit
        self._weights = WeightStaging(*named_tensors(model), version=version)
        self._lock = FairLock()
        decoding = decoder_of(model, pad_token_id, decoder, routed_experts)
        sizes = (max_batch, prefill_tokens, compact_below, version, keep_tokens, kv_cache_memory_bytes)
        self._batch = ContinuousBatch(decoding, *sizes)
        self._grammars = Grammars(tokenizer, decoding.vocab_size)
        self._thread = DecodeThread(self._turn, self._failed)
        self._exchange = ThreadPoolExecutor(1, "rollout-weights")
        self._asked: set[SequenceRequest] = set()
        self._open = OpenRequests(self._end)
        self._leader: asyncio.Task[Any] | None = None
        self._idle: list[asyncio.Future[None]] = []
        self._answers = ResultDelivery()
        self._rounds = GangScheduler(self._add) if admit == "rounds" else None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype that the module computes in."""
        return next(self._model.parameters()).dtype

    @property
    def version(self) -> int:
        """The version of the weights in use."""
        return self._weights.version

    def supports(self, feature: str) -> Supported | Unsupported:
        """Return whether this engine has the feature. Raise ValueError with all features for an unknown name."""
        if feature == "structured_outputs" and (why := self._grammars.problem):
            return Unsupported(why)
        return feature_of(NATIVE, feature)

    def load(self) -> Load:
        """Return how many requests decode and wait; any thread may call it."""
        slots = [r.slot for r in tuple(self._asked) if not r.done]
        return Load(len(slots) - slots.count(None), slots.count(None))

    @property
    def decode_steps(self) -> int:
        """Number of decode steps so far; the first token of a request comes from the prefill."""
        return self._batch.decode_steps

    @property
    def num_prefill_tokens(self) -> int:
        """Number of prompt tokens read so far; a prompt that several requests share counts once."""
        return self._batch.num_prefill_tokens

    prefilled_tokens = renamed("num_prefill_tokens")

    # -- the asynchronous face -------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        media: Mapping[str, Any] | None = None,
        *,
        request_id: str | None = None,
        deadline: float | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Sample one completion beside other requests; see `RolloutEngine`. Cancelling the task frees the slot at the
        next step. `media` is of a vision-language model (`rollout.native.decoders.media.seen_prompt`)."""
        self._check(prompt_ids, sampling)
        if media:
            prompt_ids = self._seen.prompt(prompt_ids, media)
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        (seed,) = seeds_of([sampling], self._generator)
        request = self._request(prompt_ids, sampling, seed, lambda answer: self._answers.put(future, answer))
        if on_tokens is not None:
            request.on_token = self._answers.stream(future, on_tokens)
        with self._open.opened(request, request_id, deadline):
            self._asked.add(request)
            try:
                if self._rounds is not None:
                    self._rounds.ask(request, future)
                else:
                    self._thread.post(lambda: self._batch.add(request))
                    await self._begin()
                return await future
            finally:
                self._asked.discard(request)
                if not request.done:  # cancelled, or `on_tokens` raised
                    self._end(request, "abort")

    def request_scope(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for an episode, which sends request after request: a round waits for its next one."""
        return contextlib.nullcontext() if self._rounds is None else self._rounds.request_scope()

    attended = renamed("request_scope")

    async def score(self, ids: Sequence[int], k: int = 0) -> TokenScores:
        """Score tokens between two decode steps; see `RolloutEngine`."""
        check_scored(ids, k, self._batch.decoder.vocab_size, self._max_length)
        return await asyncio.get_running_loop().run_in_executor(self._exchange, self._scored, ids, k)

    def _scored(self, ids: Sequence[int], k: int) -> TokenScores:
        with self._lock, self._sampling():
            return scores_of(ids, k, self._batch.score(ids[:-1]))

    async def cancel(self, request_id: str) -> bool:
        """End a request before the next step; see `RolloutEngine`."""
        return self._open.cancel(request_id)

    async def pause(self, mode: PauseMode = "finish") -> None:
        """Start no waiting request, and return once nothing runs. "abort" ends running ones with the tokens so far."""
        check_pause(mode)
        quiet: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def hold() -> None:
            self._batch.paused = True
            if mode == "abort":
                for request in self._batch.running:
                    self._batch.end(request, "abort")
            self._idle.append(quiet)

        self._post(hold)
        try:
            await quiet
        except asyncio.CancelledError:
            self._post(self._release)  # a cancelled caller will not resume
            raise

    async def resume(self) -> None:
        """Run the waiting requests and new ones, and drop the old weights that a commit kept."""
        self._weights.settle()
        self._post(self._release)

    def _post(self, job: Callable[[], None]) -> None:
        """Schedule a job before the next step, or at once where nothing runs. Never blocks."""
        self._thread.post(job)
        self._thread.start()

    def forget(self) -> None:
        """Clear the prefix cache. To be called after changes of the module by other means than this engine's."""
        self._post(self._batch.forget)

    def _add(self, requests: list[SequenceRequest]) -> None:
        """Add a round of requests in one step. A round of first turns alone begins with an empty prefix cache: what
        another phase of a run has cached must not decide its bits."""

        def add() -> None:
            if not any(map(self._batch.continues, requests)):
                self._batch.forget()
            for request in requests:
                self._batch.add(request)

        self._post(add)

    def _end(self, request: SequenceRequest, reason: StopReason) -> None:
        """End a request before the next step, with the tokens so far."""
        if self._rounds is not None:
            self._rounds.start_now(request)
        self._post(lambda: self._batch.end(request, reason))

    async def _begin(self) -> None:
        """Start the posted requests; the first of many lets other coroutines send theirs before."""
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        settled = self._thread.awake
        if not settled and self._leader is not None and not self._leader.done() and self._leader.get_loop() is loop:
            return
        self._leader = me
        try:
            if not settled:
                await settle()
        finally:
            self._leader = None
            self._thread.start()

    def _release(self) -> None:
        self._batch.paused = False

    def _turn(self) -> bool:
        """Run one step of the decoding thread; return whether there is more to do."""
        with self._lock, self._sampling():
            self._thread.run_pending()
            self._step()
            self._tell()
            return self._batch.has_work

    def _step(self) -> None:
        if self._batch.has_work:
            self._batch.step()

    def _failed(self, error: BaseException) -> None:
        """Fail all requests after a step that raised, and begin with an empty batch."""
        with self._lock:
            self._batch.drop_all(error)
            self._tell()

    def _tell(self) -> None:
        """Send the completions of a step, and notify those who wait until nothing runs."""
        if self._idle and not self._batch.running:
            for quiet in self._idle:
                self._answers.put(quiet, None)
            self._idle = []
        self._answers.send()

    # -- weights ---------------------------------------------------------------------------------------------------

    async def prepare(self, manifest: Manifest) -> None:
        """Begin to stage new weights beside those in use; sampling goes on."""
        self._weights.prepare(manifest)

    async def receive(self, bucket: Bucket) -> int:
        """Stage a bucket and return the number of missing elements."""
        return self._weights.receive(bucket.pieces())

    async def commit(self, version: int) -> None:
        """Swap the staged weights in between two decode steps; the old ones are kept until `resume`."""
        await self._between_steps(self._weights.commit, version)

    async def abort(self) -> None:
        """Drop what is staged, or swap the old weights back in."""
        await self._between_steps(self._weights.abort)

    async def update_weights(self, version: int, pieces: Iterable[Piece]) -> None:
        """Replace the weights between two decode steps; running requests continue with them. See `load_weights`."""
        stage(self._weights, version, pieces)
        await self._between_steps(self._weights.commit, version)
        self._weights.settle()

    def load_weights(self, version: int, pieces: Iterable[Piece]) -> None:
        """Replace every parameter, or none. Pieces are collected and checked first (one more copy of the weights in
        memory), and a ValueError about any of them leaves the old weights and version in place. Persistent buffers may
        be left out; of tied weights one name is enough. The stream is read to its end whatever happens."""
        stage(self._weights, version, pieces)
        self._exchanged(self._weights.commit, version)
        self._weights.settle()

    async def _between_steps(self, exchange: Callable[..., None], *arguments: int) -> None:
        await asyncio.get_running_loop().run_in_executor(self._exchange, self._exchanged, exchange, *arguments)

    def _exchanged(self, exchange: Callable[..., None], *arguments: int) -> None:
        """Change the weights while nothing reads them, then notify the batch."""
        with self._lock, self._sampling():
            before = self._weights.version
            exchange(*arguments)
            if self._weights.version != before:
                self._batch.swap(self._weights.version, self._on_commit == "recompute")

    # -- the synchronous core --------------------------------------------------------------------------------------

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]
    ) -> list[Completion]:
        """Return one completion a prompt, in order, beside async requests. `sampling` is one for all, or one each."""
        settings = [sampling] * len(prompts) if isinstance(sampling, Sampling) else list(sampling)
        if len(settings) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(settings)} sampling settings; give one, or one each")
        for prompt, s in {(id(p), id(s)): (p, s) for p, s in zip(prompts, settings, strict=True)}.values():
            self._check(prompt, s)  # a group's once
        answers: dict[int, Completion | BaseException] = {}
        asked = zip(prompts, settings, seeds_of(settings, self._generator), strict=True)
        requests = [self._request(*one, functools.partial(answers.__setitem__, i)) for i, one in enumerate(asked)]
        self._asked.update(requests)
        self._thread.post(functools.partial(self._batch.extend, requests))
        done = False
        try:
            while len(answers) < len(requests):
                with self._lock, self._sampling():
                    self._thread.run_pending()
                    self._step()
                    self._tell()
            done = True
        finally:
            self._asked.difference_update(requests)
            if not done:
                self._failed(RuntimeError("another call of this engine failed or was interrupted"))
        for answer in answers.values():
            if isinstance(answer, BaseException):
                raise answer
        return [answers[i] for i in range(len(requests))]  # type: ignore[misc]

    @contextlib.contextmanager
    def _sampling(self) -> Iterator[None]:
        """Disable gradients, and put the module into eval mode, inside the block."""
        training = self._model.training
        if training:
            self._model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            if training:
                self._model.train()

    def _check(self, prompt: Sequence[int], sampling: Sampling) -> None:
        check_request(prompt, sampling, self._batch.decoder.vocab_size, self._max_length)
        self._batch.check(len(prompt), sampling)

    def _request(
        self, prompt: Sequence[int], sampling: Sampling, seed: int, answer: Callable[[Completion | BaseException], None]
    ) -> SequenceRequest:
        prompt = prompt if isinstance(prompt, SeenPrompt) else tuple(prompt)
        return SequenceRequest(prompt, sampling, seed, answer, matcher=self._grammars.matcher(prompt, sampling))
