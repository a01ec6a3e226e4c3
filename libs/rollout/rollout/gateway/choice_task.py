"""A running request: its choices are sampled side by side, streamed as they come, and recorded together.

1. Each choice is a request to the engine; one that the engine aborts (for a weight sync, say) continues from its own
   tokens.
2. Where the engine streams tokens, a stream's client gets them at once, and a stop text ends the engine's work.
3. When all choices are whole the turn is recorded; where one fails or the client leaves, all are cancelled and nothing
   is.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rollout.chat.chat import Chat
from rollout.engine import Completion, OnTokens, RolloutEngine, Sampling
from rollout.episodes.runner import together
from rollout.gateway.answers import Answer, CompletionHeader
from rollout.gateway.chat_request import ChatRequest, RequestError, refuse
from rollout.gateway.recorder import Turn
from rollout.gateway.sampling_choice import Choice, ChoiceReader
from rollout.gateway.session import LiveSession
from rollout.seeds import derive_seed
from seqpack.capability import Unsupported

MAX_IDLE_ABORTS = 3  # aborts in a row without a token, after which a request fails


class ChoiceTask:
    """One request, from its first token to its record. `number` is its name for the engine."""

    def __init__(
        self, engine: RolloutEngine, chat: Chat, live: LiveSession, turn: Turn, request: ChatRequest, number: str
    ) -> None:
        self._engine, self._chat, self._live, self._turn, self._number = engine, chat, live, turn, number
        self.request = request
        self.head = CompletionHeader(f"chatcmpl-{number}", int(time.time()), request.model)
        self.news = asyncio.Event()  # set when `take` has something, or the work has ended
        self._chunks: list[dict[str, Any]] = []
        self._began = False

    def take(self) -> list[dict[str, Any]]:
        """Return the chunks of a stream that have come since the last call."""
        chunks, self._chunks = self._chunks, []
        self.news.clear()
        return chunks

    async def run(self, samplings: Sequence[Sampling]) -> Answer:
        """Sample the choices and record them. Raise RequestError where the engine refuses, or the budget is spent."""
        live, limit = self._live, samplings[0].max_new_tokens
        able = self._engine.supports("structured_outputs") if samplings[0].structured_outputs else None
        if isinstance(able, Unsupported):
            refuse(able.reason, "response_format", "unsupported_parameter")
        granted = await live.budget.take(limit * len(samplings))
        used, started = 0, time.monotonic()
        try:
            limit = min(limit, granted // len(samplings))
            if limit < 1:
                live.refuse_past("max_tokens", f"{granted} of {live.budget.total} tokens are left")
            jobs = [self._choice(i, replace(s, max_new_tokens=limit)) for i, s in enumerate(samplings)]
            read = await together(jobs)
            used = sum(len(choice.completion.ids) for choice, _ in read)
        except ValueError as error:  # such as a prompt that is too long for the model
            refuse(str(error), "messages")
        finally:
            live.budget.settle(granted, used)
            live.generate_s += time.monotonic() - started
        choices = tuple(choice for choice, _ in read)
        live.record(self._turn, choices)
        for _, last in read:
            self._tell(last)
        return Answer(self.head, self._turn.prompt_ids, choices)

    async def _choice(self, index: int, sampling: Sampling) -> tuple[Choice, list[dict[str, Any]]]:
        request, turn = replace(self.request, stop=(*self.request.stop, *sampling.stop)), self._turn
        reader = ChoiceReader(
            self._chat,
            request,
            index,
            prefill=self._chat.prefill + self._chat.decode(turn.given),
            stop_ids=sampling.stop_token_ids,
            number=self._live.recorder.number_call,
        )
        listen = (request.stream or request.stop or not request.parallel_calls) and bool(
            self._engine.supports("streaming")
        )
        completion = await sample(
            self._engine,
            turn.prompt_ids,
            replace(sampling, stop=()),  # the reader looks for them
            turn.stream.media,
            f"{self._number}.{index}",
            self._live.limits.deadline,
            partial(self._hear, reader) if listen else None,
            lambda: reader.stopped,
        )
        return reader.finish(completion)

    def _hear(self, reader: ChoiceReader, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        self._tell(reader.feed(ids, log_probs))

    def _tell(self, pieces: Sequence[dict[str, Any]]) -> None:
        if not (pieces and self.request.stream):
            return
        for piece in pieces:
            prompt = self._turn.prompt_ids if self.request.token_ids and not self._began else None
            self._began = True
            self._chunks.append(self.head.chunk(piece, prompt))
        self.news.set()


async def sample(
    engine: RolloutEngine,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    media: Mapping[str, Any] | None,
    request_id: str,
    deadline: float | None,
    on_tokens: OnTokens | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Completion:
    """Sample one completion through pauses of the engine, continuing from its own tokens after each abort.

    Each token keeps the version that sampled it. `on_tokens` gets tokens as they are sampled; once `stopped` is true
    the engine's work is ended. Raises RequestError (503) where the engine aborts again and again without a token.
    """
    ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    rest, idle, part = sampling, 0, 0
    while True:
        completion = await _generate(
            engine, [*prompt_ids, *ids], rest, media, f"{request_id}.{part}", deadline, on_tokens, stopped
        )
        idle = 0 if completion.ids else idle + 1
        part += 1
        ids += completion.ids
        log_probs += completion.log_probs
        versions += completion.policy_versions
        reason = completion.stop_reason
        if reason != "abort" or len(ids) >= sampling.max_new_tokens or stopped():
            reason = "length" if reason == "abort" else reason
            return replace(completion, ids=ids, log_probs=log_probs, policy_versions=versions, stop_reason=reason)
        if idle >= MAX_IDLE_ABORTS:
            raise RequestError(503, "the engine broke off the answer again and again; try later", code="engine_aborted")
        seed = None if sampling.seed is None else derive_seed(sampling.seed, "part", part)
        rest = replace(sampling.after(len(ids)), seed=seed)


async def _generate(
    engine: RolloutEngine,
    prompt_ids: Sequence[int],
    sampling: Sampling,
    media: Mapping[str, Any] | None,
    request_id: str,
    deadline: float | None,
    on_tokens: OnTokens | None,
    stopped: Callable[[], bool],
) -> Completion:
    """Sample one request of the engine's, and cancel it once `stopped` is true."""
    if on_tokens is None:
        return await engine.generate(prompt_ids, sampling, media, request_id=request_id, deadline=deadline)
    ending: list[asyncio.Task[bool]] = []

    def heard(ids: Sequence[int], log_probs: Sequence[float]) -> None:
        on_tokens(ids, log_probs)
        if stopped() and not ending:
            ending.append(asyncio.ensure_future(engine.cancel(request_id)))

    try:
        options: dict[str, Any] = {"request_id": request_id, "deadline": deadline}
        return await engine.generate(prompt_ids, sampling, media, **options, on_tokens=heard)
    finally:
        await asyncio.gather(*ending)
