"""A session of the gateway: its limits, its recorder and its running requests."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from rollout.chat.chat import Chat
from rollout.chat.messages import Message
from rollout.chat.token_budget import TokenBudget
from rollout.engine import Sampling
from rollout.environments.environment import End
from rollout.gateway.chat_request import ChatRequest, RequestError, refuse
from rollout.gateway.forced_call import forced_call
from rollout.gateway.recorder import Recorder, Turn
from rollout.gateway.sampling_choice import Choice
from rollout.seeds import derive_seed


@dataclass(frozen=True)
class SessionLimits:
    """Limits of a session; None is no bound.

    `max_turns` counts completions (a request for n choices has n); `max_tokens` bounds the prompt and each completion
    of a request together, and all that is sampled in the session (`TokenGateway.open(budget=...)`: in several
    sessions); `deadline` is in seconds of `time.monotonic()`: past it a running completion returns with the tokens so
    far, and later requests are refused.
    """

    max_turns: int | None = None
    max_tokens: int | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {value}")


@dataclass
class LiveSession:
    """An open session: its settings, its recorder and the running requests (by the engine's id)."""

    id: str
    sampling: Sampling
    limits: SessionLimits
    recorder: Recorder
    budget: TokenBudget
    own_sampling: bool = False  # the session's sampling wins over what a request asks for
    running: dict[str, tuple[Turn, int]] = field(default_factory=dict)  # and how many choices each asks for
    beginning: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a request's tokens are found
    limit_hit: End | None = None  # the limit that refused a request, or cut a completion off
    generate_s: float = 0.0
    cancelled: int = 0
    refused: int = 0
    closed: bool = False
    responses: dict[str, tuple[Message, ...]] = field(default_factory=dict)  # the messages up to each response's end

    def begin(self, request: ChatRequest, chat: Chat) -> tuple[Turn, list[Sampling]]:
        """Return a turn for a request, and the sampling settings of each of its choices.

        Raises RequestError past a limit, and for what the template refuses.
        """
        if self.closed:
            raise RequestError(409, f"the session {self.id!r} is closed", code="session_closed")
        self._check_limits(request)
        settings: Mapping[str, Any] = request.settings
        if self.own_sampling:  # from the request, only the length of the completion
            settings = {name: value for name, value in settings.items() if name == "max_new_tokens"}
        sampling = replace(request, settings=settings).sampling(self.sampling)
        if sampling.structured_outputs and (why := chat.structured_problem()):
            refuse(why, "response_format")
        if sampling.greedy and request.n > 1:
            refuse(f"n={request.n} likeliest answers would be one and the same: n=1, or a temperature above 0", "n")
        try:
            beginning = forced_call(chat, request.tools, request.function) if request.forces_call else []
        except ValueError as error:
            refuse(f"tool_choice can't be enforced: {error}", "tool_choice", "unsupported_parameter")
        try:
            turn = self.recorder.begin(request, beginning)
        except ValueError as error:
            refuse(f"the messages cannot be rendered: {error}", "messages")
        try:
            return turn, self._turn_samplings(turn, request, sampling, chat)
        except RequestError:
            self.recorder.abandon(turn)
            raise

    def _check_limits(self, request: ChatRequest) -> None:
        limits = self.limits
        if limits.max_turns is not None:
            left = limits.max_turns - self.recorder.turns - sum(n for _, n in self.running.values())
            if left < 1:
                self.refuse_past("max_turns", f"the session has had its {limits.max_turns} turns")
            if left < request.n:
                self.refuse_past("max_turns", f"the session has {left} of its {limits.max_turns} turns left")
        if limits.deadline is not None and time.monotonic() >= limits.deadline:
            self.refuse_past("deadline", "the session is past its deadline")
        if self.budget.is_spent:
            self.refuse_past("max_tokens", f"all {self.budget.total} tokens are sampled")

    def refuse_past(self, limit: End, reason: str) -> NoReturn:
        """Refuse a request past a limit, and remember the limit."""
        self.limit_hit = limit
        refuse(reason, code="context_length_exceeded" if limit == "max_tokens" else limit)

    def _turn_samplings(self, turn: Turn, request: ChatRequest, sampling: Sampling, chat: Chat) -> list[Sampling]:
        """Return the settings of each choice: stop tokens, most new tokens, and a seed of its own."""
        stops = tuple(dict.fromkeys((*sampling.stop_token_ids, *chat.stop_ids)))
        limit = sampling.max_new_tokens
        if self.limits.max_tokens is not None:
            limit = min(limit, self.limits.max_tokens - len(turn.prompt_ids))
            if limit < 1:
                count, most = len(turn.prompt_ids), self.limits.max_tokens
                self.refuse_past("max_tokens", f"the messages have {count} tokens, which leaves none of {most}")
        seed = sampling.seed
        if seed is not None and (self.own_sampling or "seed" not in request.settings):
            seed = derive_seed(seed, "turn", turn.number)
        first = replace(sampling, stop_token_ids=stops, max_new_tokens=limit, seed=seed)
        if seed is None:
            return [first] * request.n
        return [first, *(replace(first, seed=derive_seed(seed, "choice", i)) for i in range(1, request.n))]

    def record(self, turn: Turn, choices: Sequence[Choice]) -> None:
        """Record the choices of a response."""
        self.recorder.commit(turn, [(choice.completion, choice.recorded) for choice in choices])
        if any(choice.completion.stop_reason == "deadline" for choice in choices):
            self.limit_hit = "deadline"
