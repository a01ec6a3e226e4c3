"""The engine behind an OpenAI-compatible server: the rollout protocol here, a stream of completions there.

1. At the start the server is asked for its models and for two tokens: it must return ids and log-probs, and a top-k of
   one shows whether its log-probs are those of the distribution that is sampled from.
2. A request is a stream of its own. Closing it early ends it on the server; cancelling and deadlines keep its tokens.
3. Weights never change: every weight sync is refused, and all tokens have the version that the engine was given.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from rollout.extras import missing_extra_message

try:
    import httpx2
except ImportError as error:
    raise ImportError(missing_extra_message("the openai engine needs httpx2", "openai")) from error

from rollout.capability import feature_of
from rollout.config import RolloutConfig
from rollout.engine import Completion, Load, OnTokens, PauseMode, Sampling, StopReason, check_request
from rollout.errors import ServerError
from rollout.open_requests import OpenRequests, check_pause
from rollout.openai.completion_stream import (
    CompletionChunk,
    WireError,
    check_end,
    error_text,
    parts,
    read_chunk,
    request_body,
)
from rollout.openai.gate import Gate
from rollout.openai.settings.capability import NO_GRAMMARS, NO_MEDIA, NO_WEIGHTS, OPENAI
from rollout.openai.settings.config import OpenAIConfig
from rollout.sync.manifest import Manifest
from rollout.sync.pieces import Bucket, Piece
from rollout.token_scores import TokenScores, check_scored, scores_of_rows
from seqpack.capability import Supported, Unsupported

_START_SECONDS = 30.0
_PROBE = (1, 1)  # on a CPU, a prompt of one token ends vLLM where the model has delta nets


@dataclass(eq=False)
class _Request:
    """A prompt being continued, in a task of its own once it is sent."""

    sampling: Sampling
    on_tokens: OnTokens | None
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    reason: StopReason | None = None
    ending: StopReason | None = None
    inside: bool = False
    """Whether the request was sent to the server."""
    task: "asyncio.Task[None] | None" = None

    def take(self, part: CompletionChunk) -> None:
        """Append the tokens of an event; what `on_tokens` raises ends the request."""
        self.ids += part.ids
        self.log_probs += part.log_probs
        if part.ids and self.on_tokens is not None:
            self.on_tokens(part.ids, part.log_probs)
        check_end(part, self.ids[-1] if self.ids else None, self.sampling)
        self.reason = part.reason


class OpenAIEngine:
    """The engine of an OpenAI-compatible server. Its requests come from one event loop at a time.

    Args:
        config: the settings; its `openai` says where the server is.
        version: the version of the server's weights.

    Raises:
        ValueError: there is no server, the key is refused, or the server can't do what is asked; the text says why.
    """

    def __init__(self, config: RolloutConfig, version: int = 0) -> None:
        self._config, self._own = config, config.openai
        self.version = version
        self._seeds = random.Random(config.seed)
        self._gate = Gate(config.max_batch)
        self._requests: set[_Request] = set()
        self._open = OpenRequests(_end)
        self._client: tuple[asyncio.AbstractEventLoop, httpx2.AsyncClient] | None = None
        with httpx2.Client(headers=self._own.headers, timeout=_START_SECONDS, trust_env=False) as client:
            self._model, longest = _served_model(client, self._own)
            self._tells_sampled = _tells_sampled(client, self._own, self._model)
        if config.max_length is None and longest is None:
            raise ValueError(f"{self._own.base_url} does not tell how long a sequence may be: set max_length")
        self._max_length = min(n for n in (config.max_length, longest) if n is not None)

    @property
    def max_length(self) -> int:
        """Most tokens of prompt and completion together."""
        return self._max_length

    def supports(self, feature: str) -> Supported | Unsupported:
        """Return whether this engine has the feature. Raise ValueError with all features for an unknown name."""
        return feature_of(OPENAI, feature)

    def load(self) -> Load:
        """Return how many requests the server has, and how many wait for a place."""
        return Load(self._gate.inside, self._gate.waiting)

    async def aclose(self) -> None:
        """Close the connections of this event loop; the engine may be used again."""
        if self._client is not None and self._client[0] is asyncio.get_running_loop():
            await self._client[1].aclose()
            self._client = None

    # -- requests --------------------------------------------------------------------------------------------------

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
        """Sample one completion beside other requests; see `RolloutEngine`.

        Raises:
            ValueError: as in the protocol; what the server refuses; settings whose log-probs it does not return.
            ServerError: the server broke off, or failed by itself.
            RuntimeError: it sent an invalid response.
        """
        if media:
            raise ValueError(f"media can't be sampled from: {NO_MEDIA}")
        self._check(prompt_ids, sampling)
        client = self._client_here()
        body = request_body(self._model, prompt_ids, self._seeded(sampling))
        request = _Request(sampling, on_tokens)
        with self._open.opened(request, request_id, deadline):
            request.task = asyncio.get_running_loop().create_task(self._run(request, client, body))
            self._requests.add(request)
            try:
                await asyncio.wait([request.task])
            finally:
                self._requests.discard(request)
                request.task.cancel()
                await asyncio.gather(request.task, return_exceptions=True)
        failed = None if request.task.cancelled() else request.task.exception()
        if failed is not None and request.ending is None:
            raise failed
        reason = request.reason or request.ending
        assert reason is not None
        versions = (self.version,) * len(request.ids)
        return Completion(tuple(request.ids), tuple(request.log_probs), reason, versions)

    async def score(self, ids: Sequence[int], k: int = 0) -> TokenScores:
        """Score tokens as the prompt of one more, by `prompt_logprobs` of vLLM's server; see `RolloutEngine`."""
        check_scored(ids, k, self._own.vocab_size, self._max_length - 1)
        body = request_body(self._model, ids, Sampling(max_new_tokens=1, greedy=True))
        try:
            asked = body | {"stream": False, "prompt_logprobs": k}
            response = await self._client_here().post(self._own.url("completions"), json=asked)
        except httpx2.TransportError as error:
            raise ServerError(f"{self._own.base_url} broke off: {type(error).__name__} {error}") from error
        if response.status_code != 200:
            _refused(response, self._own)
        rows = response.json()["choices"][0].get("prompt_logprobs") or []
        told = [{int(token): one["logprob"] for token, one in (row or {}).items()} for row in rows]
        return scores_of_rows(ids, k, told, self._own.vocab_size)

    async def cancel(self, request_id: str) -> bool:
        """End a request: its `generate` returns the tokens so far, with stop_reason "abort". Return False where no such
        request is waiting or running."""
        return self._open.cancel(request_id)

    async def pause(self, mode: PauseMode = "finish") -> None:
        """Start no waiting request, and return once nothing runs. "abort" ends running requests with what they have."""
        check_pause(mode)
        if mode == "abort":
            for request in self._requests:
                if request.inside:
                    _end(request, "abort")
        await self._gate.hold()

    async def resume(self) -> None:
        """Run the waiting requests and new ones."""
        self._gate.release()

    def _check(self, prompt_ids: Sequence[int], sampling: Sampling) -> None:
        check_request(prompt_ids, sampling, self._own.vocab_size, self._max_length)
        if sampling.structured_outputs:
            raise ValueError(f"structured outputs: {NO_GRAMMARS}")
        if not sampling.is_whole and not self._tells_sampled:
            raise ValueError(
                f"{self._own.base_url} tells the log-probs of the model, not of the distribution that is sampled from: "
                "leave temperature, min_p, top_k, top_p and penalties at their defaults, or start it so that it does "
                "(vLLM: --logprobs-mode processed_logprobs)"
            )

    def _seeded(self, sampling: Sampling) -> Sampling:
        """Return the settings with a seed, for runs that repeat."""
        if sampling.greedy or sampling.seed is not None:
            return sampling
        return replace(sampling, seed=self._seeds.getrandbits(63))

    async def _run(self, request: _Request, client: httpx2.AsyncClient, body: dict[str, Any]) -> None:
        await self._gate.enter()
        request.inside = True
        try:
            async with contextlib.aclosing(self._stream(client, body)) as stream:
                async for part in stream:
                    request.take(part)
        finally:
            self._gate.leave()

    async def _stream(self, client: httpx2.AsyncClient, body: dict[str, Any]) -> AsyncGenerator[CompletionChunk]:
        try:
            async with client.stream("POST", self._own.url("completions"), json=body) as response:
                if response.status_code != 200:
                    await response.aread()
                    _refused(response, self._own)
                async with contextlib.aclosing(parts(response.aiter_lines())) as stream:
                    async for part in stream:
                        yield part
        except httpx2.TransportError as error:
            raise ServerError(f"{self._own.base_url} broke off: {type(error).__name__} {error}") from error

    def _client_here(self) -> httpx2.AsyncClient:
        """Return the connections of the running event loop; those of an earlier loop ended with it."""
        loop = asyncio.get_running_loop()
        if self._client is None or self._client[0] is not loop:
            if self._requests:
                raise ValueError("the engine is asked from two event loops at once: give each an engine of its own")
            limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self._config.max_batch)
            timeout = httpx2.Timeout(self._own.answer_seconds, connect=_START_SECONDS)
            client = httpx2.AsyncClient(headers=self._own.headers, timeout=timeout, limits=limits, trust_env=False)
            self._client = (loop, client)
        return self._client[1]

    # -- weights ---------------------------------------------------------------------------------------------------

    async def prepare(self, manifest: Manifest) -> None:
        """Raise ValueError: the server's weights never change."""
        _no_weights(manifest)

    async def receive(self, bucket: Bucket) -> int:
        """Raise ValueError: the server's weights never change."""
        _no_weights(bucket)

    async def commit(self, version: int) -> None:
        """Raise ValueError: the server's weights never change."""
        _no_weights(version)

    async def abort(self) -> None:
        """Return at once: nothing is staged."""

    async def update_weights(self, version: int, pieces: Iterable[Piece]) -> None:
        """Read the stream to its end, then raise ValueError: the server's weights never change."""
        for _ in pieces:  # other ranks of a collective export wait for this one
            pass
        _no_weights(version)


def _end(request: _Request, reason: StopReason) -> None:
    """End a request with the tokens so far."""
    if request.ending is None:
        request.ending = reason
    if request.task is not None:
        request.task.cancel()


def _no_weights(*_: object) -> NoReturn:
    raise ValueError(f"weights can't be handed over: {NO_WEIGHTS}")


def _served_model(client: httpx2.Client, own: OpenAIConfig) -> tuple[str, int | None]:
    """Return the name of the model, and the longest sequence that it takes, where the server says it."""
    models = {str(entry["id"]): entry for entry in _asked(client, own, "models", None).get("data", [])}
    name = own.model or (next(iter(models)) if len(models) == 1 else None)
    if name not in models:
        there = ", ".join(models) or "none"
        raise ValueError(f"{own.base_url} has the models {there}: name one of them (OpenAIConfig.model)")
    longest = models[name].get("max_model_len")
    return name, None if longest is None else int(longest)


def _tells_sampled(client: httpx2.Client, own: OpenAIConfig, model: str) -> bool:
    """Return whether log-probs are those of the distribution that is sampled from: with a top-k of 1 they are 0 then.

    Raises:
        ValueError: the server does not return ids and log-probs at all.
    """
    body = request_body(model, _PROBE, Sampling(max_new_tokens=2, top_k=1, seed=0)) | {"stream": False}
    try:
        part = read_chunk(_asked(client, own, "completions", body))
    except WireError as error:
        raise ValueError(f"{own.base_url} can't be sampled from: {error}") from error
    if part is None or not part.ids:
        raise ValueError(f"{own.base_url} can't be sampled from: it answered without a token")
    return max(map(abs, part.log_probs)) < 1e-4


def _asked(client: httpx2.Client, own: OpenAIConfig, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    url = own.url(path)
    try:
        response = client.get(url) if body is None else client.post(url, json=body)
    except httpx2.TransportError as error:
        raise ValueError(f"nobody answers at {url} ({error}): start the server first") from error
    if response.status_code != 200:
        _refused(response, own)
    answer = response.json()
    if not isinstance(answer, dict):
        raise ValueError(f"{url} is no OpenAI-compatible server: it answered {str(answer)[:80]!r}")
    return answer


def _refused(response: httpx2.Response, own: OpenAIConfig) -> NoReturn:
    """Raise ValueError for what the caller can fix, ServerError for the server's own failure."""
    try:
        text = error_text(response.json())
    except ValueError:
        text = response.text[:500]
    if response.status_code in (401, 403):
        raise ValueError(f"{own.base_url} refuses the key: put the server's into ${own.key_variable}")
    kind = ValueError if response.status_code < 500 else ServerError
    raise kind(f"{own.base_url} refuses a request ({response.status_code}): {text}")
