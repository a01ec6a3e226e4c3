"""Agents: programs that drive themselves and reach the policy through a gateway, played as episodes.

An agent is called with an `AgentSlot` (the policy's address, and the episode) and returns the episode's score. It may
be async or block: one that blocks has a thread of its own, async ones share an event loop (and so may share clients);
neither can block sampling. Its requests are recorded token by token.

Truncation is no failure: where a limit of the episode (turns, tokens, time) ended the agent, the episode scores
`cut_off_reward`. Anything else that the agent raises fails the episode, as an environment's errors do.
"""

import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from rollout.chat.chat import Chat
from rollout.chat.token_budget import TokenBudget
from rollout.engine import RolloutEngine, Sampling
from rollout.environments.environment import End, EpisodeContext, Score
from rollout.environments.sources import TaskRow
from rollout.episodes.episode import Episode
from rollout.episodes.runner import score_together, together
from rollout.errors import EpisodeFailed, error_text
from rollout.gateway.result import SessionRecord
from rollout.gateway.server import TokenGateway
from rollout.gateway.session import SessionLimits
from rollout.seeds import derive_seed
from rollout.tools.tool_stats import summed_metrics
from rollout.tools.workers import OverrunError, RefusedError, Workers

AGENTS = Workers("agent", max_abandoned=64, one_loop=True)
GRACE = 30.0  # seconds after a deadline in which an agent may still return


@dataclass(frozen=True)
class AgentSlot:
    """Arguments of an agent: the policy's address and key for an OpenAI client, and the episode.

    Requests with another session id belong to the episode too once `join` has named them (for agents whose framework
    makes its own ids and sends them as X-Session-ID beside the gateway's token).
    """

    base_url: str
    api_key: str
    model: str
    context: EpisodeContext
    gateway: TokenGateway = field(repr=False)
    limits: SessionLimits = field(repr=False)
    budget: TokenBudget = field(repr=False)
    sampling: Sampling | None = field(repr=False)
    sessions: dict[str, str] = field(repr=False)  # session id -> the agent's name in the episode, "" its own

    def join(self, session_id: str, agent: str = "") -> None:
        """Open another session for this episode, for a sub-agent of that name ("": the episode's own)."""
        seed = None if self.sampling is None else self.sampling.seed
        sampling = self.sampling
        if sampling is not None and seed is not None:
            sampling = replace(sampling, seed=derive_seed(seed, "session", len(self.sessions)))
        self.gateway.open(session_id, sampling=sampling, limits=self.limits, budget=self.budget)
        self.sessions[session_id] = agent


Seat = AgentSlot  # its earlier name
Agent = Callable[[AgentSlot], Score | float | Awaitable[Score | float]]
"""Function that plays and scores one episode. It may have `score_group(episodes)`, as an environment's factory may."""


async def run_agent(
    agent: Agent,
    gateway: TokenGateway,
    *,
    sampling: Sampling | None = None,
    context: EpisodeContext | None = None,
    max_turns: int | None = None,
    max_tokens: int | None = None,
    deadline: float | None = None,
    cut_off_reward: float = 0.0,
    group: int = 0,
) -> Episode:
    """Play one episode; one that fails returns with its error.

    `sampling` (None: the gateway's) holds the defaults of the agent's requests; `context.seed` fixes what is sampled
    where requests come one after another. The limits are those of `SessionLimits`, for each session of the episode;
    what is sampled in all of them together stays within `max_tokens`.
    """
    return (await _play(agent, gateway, sampling, context, max_turns, max_tokens, deadline, cut_off_reward, group))[0]


async def run_agents(
    agent: Agent,
    gateway: TokenGateway,
    *,
    size: int,
    row: TaskRow | None = None,
    group: int = 0,
    attempts: int = 2,
    sampling: Sampling | None = None,
    max_turns: int | None = None,
    max_tokens: int | None = None,
    deadline: float | None = None,
    cut_off_reward: float = 0.0,
) -> list[Episode]:
    """Play `size` episodes of one task at once, as `run_group` does: seeds, attempts and `score_group` are the same."""
    if size < 1 or attempts < 1:
        raise ValueError(f"a group has at least 1 episode and each at least 1 attempt, got {size} and {attempts}")
    row = row or TaskRow("task")
    seed = row.seed(None if sampling is None else sampling.seed)

    async def play(index: int) -> Episode:
        own = None if seed is None else derive_seed(seed, "episode", index)
        for attempt in range(attempts):
            context = EpisodeContext(row.id, attempt, index, own, row.data, environment=row.environment)
            episode, again = await _play(
                agent, gateway, sampling, context, max_turns, max_tokens, deadline, cut_off_reward, group
            )
            if not again:
                break
        return episode

    return await score_together(agent, await together(play(index) for index in range(size)))


@dataclass(frozen=True)
class AgentTask:
    """An agent in place of an environment factory: `run_group(AgentTask(agent), engine, chat, ...)`.

    Its requests are sampled with the run's settings, whatever temperature the agent asks for (with `own_sampling=False`
    as it asks), and are refused past the run's limits.
    """

    agent: Agent
    cut_off_reward: float = 0.0
    own_sampling: bool = True

    def __call__(self) -> NoReturn:
        """Raise ValueError: an agent is no environment."""
        raise ValueError("an agent drives itself and can't be put inside an environment: give AgentTask to run_group")

    def rows(self) -> list[TaskRow] | None:
        """Return the tasks that the agent brings, by its own `rows()`; None where it has none."""
        own = getattr(self.agent, "rows", None)
        return None if own is None else list(own())

    async def run_group(
        self, engine: RolloutEngine, chat: Chat, sampling: Sampling, *, size: int, **options: Any
    ) -> list[Episode]:
        """Play the episodes of a group through sessions of a gateway that is open as long."""
        async with TokenGateway(engine, chat, sampling=sampling, own_sampling=self.own_sampling) as gateway:
            options |= {"sampling": sampling, "cut_off_reward": self.cut_off_reward}
            return await run_agents(self.agent, gateway, size=size, **options)


async def _play(
    agent: Agent,
    gateway: TokenGateway,
    sampling: Sampling | None,
    context: EpisodeContext | None,
    max_turns: int | None,
    max_tokens: int | None,
    deadline: float | None,
    cut_off_reward: float,
    group: int,
) -> tuple[Episode, bool]:
    """Play one episode; return it, and whether it failed in a way that may pass."""
    context = context or EpisodeContext("task", seed=None if sampling is None else sampling.seed)
    if sampling is not None and not sampling.greedy:
        sampling = replace(sampling, seed=context.seed)
    started, name = time.monotonic(), uuid.uuid4().hex
    limits = SessionLimits(max_turns, max_tokens, deadline)
    budget = TokenBudget(max_tokens)
    gateway.open(name, sampling=sampling, limits=limits, budget=budget)
    key = gateway.key(name)
    slot = AgentSlot(gateway.base_url, key, gateway.model, context, gateway, limits, budget, sampling, {name: ""})
    score, error, again = None, None, False
    end: End = "failed"
    closed: list[SessionRecord] = []
    try:
        end, score = await _run_agent(agent, slot, deadline)
    except EpisodeFailed as failed:
        error, again = failed.reason, failed.retryable
    finally:
        closed = [await gateway.close(session_id) for session_id in slot.sessions]
    if error is None and score is None:
        score = Score(cut_off_reward)
    segments = [
        replace(segment, agent=who)
        for session, who in zip(closed, slot.sessions.values(), strict=True)
        for segment in session.segments
    ]
    own = next((session for session in closed if session.messages), closed[0])
    generate = sum(session.generate_s for session in closed)
    total = time.monotonic() - started
    episode = Episode(
        id=f"{context.key}/{context.index}/{context.attempt}",
        task_id=context.key,
        attempt=context.attempt,
        segments=tuple(segments),
        score=score,
        end=end,
        timings={"generate_s": generate, "environment_s": max(0.0, total - generate), "total_s": total},
        error=error,
        messages=own.messages,
        metrics={
            **summed_metrics(session.tools for session in closed),
            "turns": sum(session.turns for session in closed),
        },
        group=group,
    )
    return episode, again


async def _run_agent(agent: Agent, slot: AgentSlot, deadline: float | None) -> tuple[End, Score | None]:
    """Run the agent; return how it ended, and its score (None after a limit). Raise EpisodeFailed if it raises."""
    name = getattr(agent, "__qualname__", type(agent).__qualname__)
    left = float("inf") if deadline is None else max(0.0, deadline - time.monotonic()) + GRACE
    try:
        ended = await AGENTS.run(name, left, agent, slot)
    except OverrunError:
        return "deadline", None
    except RefusedError as refused:
        raise EpisodeFailed(f"the agent {name} is refused: {refused}", retryable=False) from None
    limit = next((hit for session in slot.sessions if (hit := slot.gateway.limit_hit(session))), None)
    error = ended.error
    if isinstance(error, EpisodeFailed):
        raise error
    if error is not None:
        if limit is not None:  # the refusal of a request past the limit ended it
            return limit, None
        raise EpisodeFailed(f"the agent raised {error_text(error)}", retryable=True) from error
    value = ended.value
    if isinstance(value, bool | int | float):
        value = _score(float(value))
    if not isinstance(value, Score):
        raise EpisodeFailed(f"the agent {name} gave {type(value).__name__}: it gives a Score or a number", False)
    return limit or "done", value


def _score(reward: float) -> Score:
    try:
        return Score(reward)
    except ValueError as error:
        raise EpisodeFailed(str(error), retryable=False) from error
