"""The requests of a vLLM engine: who waits, who was asked, what each has so far.

Requests live on the event loop of whoever asked; the thread that reads the wire hands each loop what is its own. Those
that are asked in a few turns of the loop go in one message to each copy of the model, so that a group begins in one
step; a request goes to the copy that has the fewest, or to the one that it names.
"""

import asyncio
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout.engine import Completion, OnTokens, Sampling, StopReason
from rollout.errors import EpisodeFailed
from rollout.experts import ROUTED_EXPERTS, RoutedExperts
from rollout.open_requests import settle
from rollout.vllm.client.images import Image, Shown

Send = Callable[..., None]
"""(copy, message, bytes behind it)."""
TokenUpdate = Sequence[Any]
"""[number, ids, log-probs, why it ended or None, experts or None] of one request, as the server tells it."""


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
    shown: Shown | None = None
    copy: int | None = None
    """The one that it names, or has been asked of."""

    def plain(self, images: Mapping[str, int]) -> list[Any]:
        """As a message holds it; `images`: where the message has each image, by name."""
        s = self.sampling
        how = {
            "max_tokens": s.max_new_tokens,
            "temperature": 0.0 if s.greedy else s.temperature,
            "top_k": s.top_k,
            "top_p": s.top_p,
            "stop_token_ids": list(s.stop_token_ids),
            "seed": self.seed,
        }
        asked = [self.number, list(self.prompt), how]
        if self.shown is None:
            return asked
        return [*asked, [images[one.name] for one in self.shown.images], self.shown.places, self.shown.positions]

    def take(self, ids: Sequence[int], log_probs: Sequence[float], version: int) -> None:
        """Append what a step gave. What `on_tokens` raises ends the request."""
        self.ids += ids
        self.log_probs += log_probs
        self.versions += [version] * len(ids)
        if ids and self.on_tokens is not None:
            self.on_tokens(ids, log_probs)

    def finish(self, reason: StopReason) -> None:
        """Answer with what there is."""
        if not self.answer.done():
            extras = {}
            if self.experts is not None:
                extras[ROUTED_EXPERTS] = self.experts.resized(len(self.prompt) + len(self.ids))
            done = Completion(tuple(self.ids), tuple(self.log_probs), reason, tuple(self.versions), extras)
            self.answer.set_result(done)

    def fail(self, error: BaseException) -> None:
        """Answer with an error."""
        if not self.answer.done():
            self.answer.set_exception(error)


def ask_message(requests: Iterable[VllmRequest]) -> tuple[dict[str, Any], list[memoryview]]:
    """Return what asks for them, and the patches of their images behind it; an image that several show goes once."""
    requests = list(requests)
    images: dict[str, Image] = {one.name: one for r in requests if r.shown is not None for one in r.shown.images}
    places = {name: place for place, name in enumerate(images)}
    message: dict[str, Any] = {"ask": [request.plain(places) for request in requests]}
    if images:
        message["images"] = [[one.name, one.grid, one.patches.shape[1]] for one in images.values()]
    return message, [one.patches.numpy().data.cast("B") for one in images.values()]


class VllmRequests:
    """All requests that are not answered. `send` puts a message, and bytes behind it, on the wire of a copy.

    Invariants: a request waits (nobody was asked), or is asked until the server says it ended or it is dropped; while
    held, nothing is asked.
    """

    def __init__(self, send: Send, copies: int = 1) -> None:
        self._send = send
        self._living = list(range(copies))
        self._lock = threading.Lock()
        self._asked: dict[int, VllmRequest] = {}
        self._waiting: dict[int, VllmRequest] = {}
        self._held = False
        self._lost: RuntimeError | None = None
        self._quiet: list[asyncio.Future[None]] = []

    def counts(self) -> tuple[int, int]:
        """Return (asked, waiting)."""
        with self._lock:
            return len(self._asked), len(self._waiting)

    def add(self, request: VllmRequest) -> None:
        """Ask, in a few turns of the loop, or once nothing is held any more.

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
            begun, self._waiting = self._waiting, {}
            for copy, mine in self._dealt(begun.values()).items():
                self._send(copy, *ask_message(mine))

    def _dealt(self, begun: Iterable[VllmRequest]) -> dict[int, list[VllmRequest]]:
        """Return who is asked of which copy, each of the one that has the fewest by then; who names a dead one hears of
        it."""
        dealt: defaultdict[int, list[VllmRequest]] = defaultdict(list)
        counts = Counter(request.copy for request in self._asked.values())
        for request in begun:
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
        """Have a request answered with what it has."""
        request.ending = reason
        with self._lock:
            waited = self._waiting.pop(request.number, None)
            if request.number in self._asked:
                self._send(request.copy, {"end": [request.number]})
        if waited is not None:
            request.finish(reason)

    def drop(self, request: VllmRequest) -> None:
        """Forget a request that nobody waits for any more."""
        with self._lock:
            self._waiting.pop(request.number, None)
            if self._asked.pop(request.number, None) is not None:
                self._send(request.copy, {"end": [request.number]})
        self._tell_quiet()

    async def hold(self, abort: bool) -> None:
        """Ask nothing more, and return once nothing is asked; `abort` ends what is."""
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
            if not done:  # who gave up waiting does not know that anything is held
                self.release()

    def release(self) -> None:
        """Ask what waited."""
        with self._lock:
            self._held = False
        self._ask()

    def told(self, step: Sequence[TokenUpdate], version: int) -> None:
        """What a step gave, from the thread that reads the wire."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[tuple[VllmRequest, TokenUpdate]]] = defaultdict(list)
        for told in step:
            request = self._asked.get(told[0])
            if request is not None:
                by_loop[request.loop].append((request, told))
        for loop, mine in by_loop.items():
            _post(loop, self._take, mine, version)

    def refused(self, number: int, error: ValueError) -> None:
        """vLLM does not take a request."""
        request = self._asked.get(number)
        if request is not None:
            _post(request.loop, self._close, request, error)

    def fail_copy(self, copy: int, error: EpisodeFailed) -> None:
        """One of several processes is gone: who was asked of it hears so, and nobody is from now on."""
        with self._lock:
            self._living.remove(copy)
            lost = [request for request in self._asked.values() if request.copy == copy]
        for request in lost:
            _post(request.loop, self._close, request, error)

    def fail_all(self, error: RuntimeError) -> None:
        """The last process is gone: everyone who waits hears of it, and whoever asks from now on."""
        with self._lock:
            self._lost = error
            lost = [*self._asked.values(), *self._waiting.values()]
            self._waiting = {}
        for request in lost:
            _post(request.loop, self._close, request, error)

    def _take(self, mine: list[tuple[VllmRequest, TokenUpdate]], version: int) -> None:
        for request, (_, ids, log_probs, reason, experts) in mine:
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
    """Have a loop do something; nothing where the loop is gone, and with it whoever waited."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(job, *arguments)
