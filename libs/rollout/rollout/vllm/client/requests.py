"""The requests of a vLLM engine: which wait, which were sent, and the tokens of each so far.

Requests live on the event loop of their caller; the thread that reads the wire passes tokens to their loops. Requests
that come within a few turns of the loop go in one message to each copy of the model, so that a group begins in one
step; a request goes to the copy that has the fewest, or to the one that it names.
"""

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.engine import Completion, OnTokens, Sampling, StopReason
from rollout.errors import EpisodeFailed
from rollout.experts import ROUTED_EXPERTS, RoutedExperts
from rollout.open_requests import settle
from rollout.structured_outputs import NO_TOKENIZER, check_ends
from rollout.vllm.client.images import Image, Shown

Send = Callable[..., None]
"""Function of (copy, message, bytes after it)."""
TokenUpdate = Sequence[Any]
"""[number, ids, log-probs, why it ended or None, experts or None] of one request, as the server sends it; then [token,
log-prob] pairs at each token of its prompt where they were asked for."""
PROMPT_LOGPROBS = "prompt_logprobs"
"""Name among a completion's extras of log-probs by token at each token of its prompt."""


def check_structured(sampling: Sampling, ends: tuple[int | None, Collection[int]] | None) -> None:
    """Raise ValueError for structured outputs that vLLM could not end; `ends`: its tokenizer's, None without one."""
    if sampling.structured_outputs:
        if ends is None:
            raise ValueError(NO_TOKENIZER)
        check_ends(sampling.stop_token_ids, *ends)


@dataclass(eq=False)
class VllmRequest:
    """A prompt being continued, on its event loop."""

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int | None
    on_tokens: OnTokens | None
    loop: asyncio.AbstractEventLoop
    answer: "asyncio.Future[Completion]"
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ending: StopReason = "abort"
    experts: RoutedExperts | None = None
    prompt_rows: list[dict[int, float] | None] | None = None
    shown: Shown | None = None
    prompt_logprobs: int | None = None
    """How many log-probs of each token of the prompt are asked for, beside the token's own."""
    started: bool = False
    """Whether a step gave it tokens: the next ones decode, and may have drafts."""
    copy: int | None = None
    """The copy that it names, or was sent to."""

    def plain(self, images: Mapping[str, int]) -> list[Any]:
        """Return the fields for a message; `images`: the index of each image in the message, by name."""
        s = self.sampling
        how = {
            "max_tokens": s.max_new_tokens,
            "temperature": 0.0 if s.greedy else s.temperature,
            "top_k": s.top_k,
            "top_p": s.top_p,
            "min_p": s.min_p,
            "presence_penalty": s.presence_penalty,
            "frequency_penalty": s.frequency_penalty,
            "repetition_penalty": s.repetition_penalty,
            "stop_token_ids": list(s.stop_token_ids),
            "seed": self.seed,
        }
        if s.structured_outputs:
            how["structured_outputs"] = s.structured_outputs.plain()
        if self.prompt_logprobs is not None:
            how["prompt_logprobs"] = self.prompt_logprobs
        fields = [self.number, list(self.prompt), how]
        if self.shown is None:
            return fields
        return [*fields, [images[one.name] for one in self.shown.images], self.shown.places, self.shown.positions]

    def take(self, ids: Sequence[int], log_probs: Sequence[float], version: int) -> None:
        """Append the tokens of a step. What `on_tokens` raises ends the request."""
        self.ids += ids
        self.log_probs += log_probs
        self.versions += [version] * len(ids)
        if ids and self.on_tokens is not None:
            self.on_tokens(ids, log_probs)

    def finish(self, reason: StopReason) -> None:
        """Finish with the tokens so far."""
        if not self.answer.done():
            extras: dict[str, Any] = {} if self.prompt_rows is None else {PROMPT_LOGPROBS: self.prompt_rows}
            if self.experts is not None:
                extras[ROUTED_EXPERTS] = self.experts.resized(len(self.prompt) + len(self.ids))
            done = Completion(tuple(self.ids), tuple(self.log_probs), reason, tuple(self.versions), extras)
            self.answer.set_result(done)

    def fail(self, error: BaseException) -> None:
        """Fail with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


def ask_message(requests: Iterable[VllmRequest]) -> tuple[dict[str, Any], list[memoryview]]:
    """Return the message of these requests, and the patches of their images, each image once."""
    requests = list(requests)
    images: dict[str, Image] = {one.name: one for r in requests if r.shown is not None for one in r.shown.images}
    places = {name: place for place, name in enumerate(images)}
    message: dict[str, Any] = {"ask": [request.plain(places) for request in requests]}
    if images:
        message["images"] = [[one.name, one.grid, one.patches.shape[1]] for one in images.values()]
    return message, [one.patches.numpy().data.cast("B") for one in images.values()]


class VllmRequests:
    """All unfinished requests. `send` puts a message, and bytes after it, on the wire of a copy.

    Invariants: a request waits (unsent), or is sent until the server ends it or it is dropped; while held, nothing is
    sent.
    """

    def __init__(self, send: Send, copies: int = 1) -> None:
        self._send = send
        self._living = list(range(copies))
        self._lock = threading.Lock()
        self._asked: dict[int, VllmRequest] = {}
        self._waiting: dict[int, VllmRequest] = {}
        self._held = False
        self._lost: RuntimeError | None = None
        self._steps = self._decoded = 0
        """Decode steps of all requests since they were last asked for, and the tokens that these gave."""
        self._quiet: list[asyncio.Future[None]] = []

    def counts(self) -> tuple[int, int]:
        """Return how many requests are sent, and how many wait."""
        with self._lock:
            return len(self._asked), len(self._waiting)

    def take_accepted(self) -> float | None:
        """Return how many tokens beyond its own a request's decode step gave on average since the last call: the drafts
        that the model accepted. None where there was no step."""
        with self._lock:
            steps, decoded = self._steps, self._decoded
            self._steps = self._decoded = 0
        return decoded / steps - 1 if steps else None

    def add(self, request: VllmRequest) -> None:
        """Send a request in a few turns of the loop, or once sending is not held any more.

        Raises:
            RuntimeError: the last process is gone.
        """
        with self._lock:
            if self._lost is not None:
                raise self._lost
            first = not any(other.loop is request.loop for other in self._waiting.values())
            self._waiting[request.number] = request
        if first:
            request.loop.create_task(self._settle())

    async def _settle(self) -> None:
        await settle()
        self._ask()

    def _ask(self) -> None:
        with self._lock:
            if self._held or not self._waiting:
                return
            requests, self._waiting = self._waiting, {}
            for copy, mine in self._by_copy(requests.values()).items():
                self._send(copy, *ask_message(mine))

    def _by_copy(self, requests: Iterable[VllmRequest]) -> dict[int, list[VllmRequest]]:
        """Group requests by copy, each at the one that has the fewest by then; fail those that name a dead copy."""
        dealt: defaultdict[int, list[VllmRequest]] = defaultdict(list)
        counts = Counter(request.copy for request in self._asked.values())
        for request in requests:
            if request.copy is None:
                request.copy = min(self._living, key=counts.__getitem__)
            self._asked[request.number] = request
            if request.copy in self._living:
                counts[request.copy] += 1
                dealt[request.copy].append(request)
            else:
                _post(request.loop, self._close, request, EpisodeFailed(f"copy {request.copy} is gone", retryable=True))
        return dealt

    def end(self, request: VllmRequest, reason: StopReason) -> None:
        """End a request with the tokens so far."""
        request.ending = reason
        with self._lock:
            waited = self._waiting.pop(request.number, None)
            if request.number in self._asked:
                self._send(request.copy, {"end": [request.number]})
        if waited is not None:
            request.finish(reason)

    def drop(self, request: VllmRequest) -> None:
        """Remove a request whose caller is gone."""
        with self._lock:
            self._waiting.pop(request.number, None)
            if self._asked.pop(request.number, None) is not None:
                self._send(request.copy, {"end": [request.number]})
        self._tell_quiet()

    async def hold(self, abort: bool) -> None:
        """Send nothing more, and return once no request runs; `abort` ends running ones."""
        quiet: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._held = True
            self._quiet.append(quiet)
            if abort:
                for copy in {request.copy for request in self._asked.values()}:
                    mine = [number for number, request in self._asked.items() if request.copy == copy]
                    self._send(copy, {"end": mine})
        self._tell_quiet()
        done = False
        try:
            await quiet
            done = True
        finally:
            if not done:  # a cancelled caller will not release
                self.release()

    def release(self) -> None:
        """Send the waiting requests."""
        with self._lock:
            self._held = False
        self._ask()

    def on_step(self, step: Sequence[TokenUpdate], version: int) -> None:
        """Pass on the tokens of a step, from the thread that reads the wire."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[VllmRequest, TokenUpdate]]] = defaultdict(list)
        for update in step:
            request = self._asked.get(update[0])
            if request is not None:
                by_loop[request.loop].append((request, update))
                self._count(request, len(update[1]))
        for loop, mine in by_loop.items():
            _post(loop, self._take, mine, version)

    def _count(self, request: VllmRequest, tokens: int) -> None:
        """Count a decode step: the one that gives the first token has read the prompt, and no drafts."""
        if tokens and request.started:
            with self._lock:
                self._steps += 1
                self._decoded += tokens
        request.started = request.started or tokens > 0

    def refused(self, number: int, error: ValueError) -> None:
        """Fail a request that vLLM refuses."""
        request = self._asked.get(number)
        if request is not None:
            _post(request.loop, self._close, request, error)

    def fail_copy(self, copy: int, error: EpisodeFailed) -> None:
        """Fail the requests of one of several copies that is gone; no further ones are sent to it."""
        with self._lock:
            self._living.remove(copy)
            lost = [request for request in self._asked.values() if request.copy == copy]
        for request in lost:
            _post(request.loop, self._close, request, error)

    def fail_all(self, error: RuntimeError) -> None:
        """Fail all requests after the last process is gone, and all later ones."""
        with self._lock:
            self._lost = error
            lost = [*self._asked.values(), *self._waiting.values()]
            self._waiting = {}
        for request in lost:
            _post(request.loop, self._close, request, error)

    def _take(self, mine: list[tuple[VllmRequest, TokenUpdate]], version: int) -> None:
        for request, (_, ids, log_probs, reason, experts, *prompt) in mine:
            if request.answer.done():
                continue
            try:
                request.take(ids, log_probs, version)
            except BaseException as error:  # noqa: BLE001  the caller's own, and raised where it waits
                self.drop(request)
                request.fail(error)
                continue
            if reason is not None:
                request.experts = None if experts is None else RoutedExperts.read(experts)
                request.prompt_rows = [dict(row) for row in prompt[0]] if prompt else None
                self._close(request, request.ending if reason == "abort" else reason)

    def _close(self, request: VllmRequest, outcome: StopReason | BaseException) -> None:
        with self._lock:
            self._asked.pop(request.number, None)
            self._waiting.pop(request.number, None)
        if isinstance(outcome, BaseException):
            request.fail(outcome)
        else:
            request.finish(outcome)
        self._tell_quiet()

    def _tell_quiet(self) -> None:
        with self._lock:
            if self._asked:
                return
            quiet, self._quiet = self._quiet, []
        for waiter in quiet:
            _post(waiter.get_loop(), _settle_future, waiter)


def _settle_future(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


def _post(loop: asyncio.AbstractEventLoop, job: Callable[..., None], *arguments: Any) -> None:
    """Call a function on a loop; do nothing where the loop, and with it the caller, is gone."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(job, *arguments)
