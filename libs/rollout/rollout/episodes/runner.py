"""Playing episodes: a reply, an environment step, and again, until the episode is done or a limit is reached.

1. The environment opens; its messages begin a conversation.
2. Turn by turn: sample a reply, pass it to the environment, add its messages (or continue from its new context).
3. However that ends, `finish(end)` scores it, and `close()` is called once.
4. What an environment or a reward raises fails this episode alone; it is played again with the same seed, so that a
   lost machine does not select among completions, then reported. `EpisodeFailed(retryable=False)` is reported at once.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

from rollout.chat.chat import Chat
from rollout.chat.conversation import Conversation, TokensSpentError
from rollout.chat.messages import Message, Reply
from rollout.chat.token_budget import TokenBudget
from rollout.engine import RolloutEngine, Sampling
from rollout.environments.checked import checked
from rollout.environments.environment import (
    End,
    Environment,
    EnvironmentFactory,
    EpisodeContext,
    Observation,
    Score,
    StepResult,
)
from rollout.environments.sources import TaskRow
from rollout.environments.thread_environment import host
from rollout.episodes.episode import Episode
from rollout.errors import EpisodeFailed, error_text
from rollout.seeds import derive_seed
from rollout.tools.tool import Tool, as_tools
from rollout.tools.tool_stats import ToolStats, summed_metrics
from rollout.tools.workers import REWARDS, OverrunError, RefusedError

T = TypeVar("T")
R = TypeVar("R", Observation, StepResult, Score)
GROUP_SCORE_TIMEOUT = 600.0  # seconds
CLOSE_TIMEOUT = 60.0


class _DeadlinePassed(Exception):  # noqa: N818  not an error: time is up
    """The deadline passed while the environment was called."""


@dataclass
class _Play:
    """A running episode."""

    context: EpisodeContext
    group: int
    started: float = field(default_factory=time.monotonic)
    conversations: list["_Timed"] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    generate_s: float = 0.0
    environment_s: float = 0.0

    def ended(self, end: End, score: Score | None, error: str | None) -> Episode:
        """Return the episode with all that was sampled in it."""
        context, main = self.context, self.main
        return Episode(
            id=f"{context.key}/{context.index}/{context.attempt}",
            task_id=context.key,
            attempt=context.attempt,
            segments=tuple(s for c in self.conversations for s in c.segments if s.sampled or c is main),
            score=score,
            end=end,
            timings={
                "generate_s": self.generate_s,
                "environment_s": self.environment_s,
                "total_s": time.monotonic() - self.started,
            },
            error=error,
            messages=tuple(main.messages) if main else (),
            metrics=summed_metrics(c.tally.metrics for c in self.conversations)
            | self.metrics
            | {"turns": main.turns if main else 0},
            group=self.group,
        )

    @property
    def main(self) -> "_Timed | None":
        """The episode's own conversation."""
        return next((c for c in self.conversations if not c.agent), None)

    async def ask(self, answer: Awaitable[T], what: str, deadline: float | None = None) -> T:
        """Await a call of the environment. Raise EpisodeFailed for its errors, _DeadlinePassed past the deadline."""
        start = time.monotonic()
        limit: asyncio.Timeout | None = None
        try:
            if deadline is None:  # called a thousand times a step: without a deadline it must cost nothing
                return await answer
            async with asyncio.timeout(max(0.0, deadline - start)) as limit:
                return await answer
        except EpisodeFailed:
            raise
        except Exception as error:
            if limit is not None and isinstance(error, TimeoutError) and limit.expired():
                raise _DeadlinePassed from None
            raise EpisodeFailed(f"{what} raised {error_text(error)}", retryable=True) from error
        finally:
            self.environment_s += time.monotonic() - start


async def run_episode(
    environment: EnvironmentFactory,
    engine: RolloutEngine,
    chat: Chat,
    sampling: Sampling,
    *,
    context: EpisodeContext | None = None,
    max_turns: int = 8,
    max_tokens: int | None = None,
    deadline: float | None = None,
    group: int = 0,
) -> Episode:
    """Play one episode; one that fails returns with its error, and is not tried again here.

    Sampling stops at the chat's stop tokens besides `sampling.stop_token_ids`. `max_turns` bounds the replies of the
    episode's own conversation, `max_tokens` the tokens of it: each of its streams has at most as many, prompt and turns
    together, and so have all the turns of all its streams, sub-agents' too (a turn gets at most what is left).
    `deadline` (seconds of `time.monotonic()`) bounds all of it. Each reaches `finish(end)`. `context.seed`, or else the
    seed in `sampling`, fixes what is sampled. An environment is played in a thread of its own unless its factory is
    marked `instant` (`rollout.environments.thread_environment`).
    """
    return (await _play(environment, engine, chat, sampling, context, max_turns, max_tokens, deadline, group))[0]


async def run_group(
    environment: EnvironmentFactory,
    engine: RolloutEngine,
    chat: Chat,
    sampling: Sampling,
    *,
    size: int,
    row: TaskRow | None = None,
    group: int = 0,
    attempts: int = 2,
    max_turns: int = 8,
    max_tokens: int | None = None,
    deadline: float | None = None,
) -> list[Episode]:
    """Play `size` episodes of one task at once; return them in order of their index.

    An episode that fails in a way that may pass is played again, up to `attempts` times in all, while its siblings go
    on. The seed in `sampling` is the run's: the row's id, its visit and the index give each episode its own. A
    factory's `score_group` scores them against one another at the end. A factory with a `run_group` of its own plays
    the group instead (`AgentTask`: an agent that drives itself). When this call is cancelled, or an engine fails, every
    episode is cancelled and its environment closed.
    """
    if size < 1 or attempts < 1:
        raise ValueError(f"a group has at least 1 episode and each at least 1 attempt, got {size} and {attempts}")
    row = row or TaskRow("task")
    if (own := getattr(environment, "run_group", None)) is not None:
        limits = {"max_turns": max_turns, "max_tokens": max_tokens, "deadline": deadline}
        return list(await own(engine, chat, sampling, size=size, row=row, group=group, attempts=attempts, **limits))
    seed = row.seed(sampling.seed)

    async def play(index: int) -> Episode:
        own = None if seed is None else derive_seed(seed, "episode", index)
        for attempt in range(attempts):
            context = EpisodeContext(row.id, attempt, index, own, row.data, environment=row.environment)
            episode, again = await _play(
                environment, engine, chat, sampling, context, max_turns, max_tokens, deadline, group
            )
            if not again:
                break
        return episode

    return await score_together(environment, await together(play(index) for index in range(size)))


async def together(jobs: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results, in order. Where one raises or the caller is cancelled, cancel and await all."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        left = [task for task in tasks if not task.done()]
        for task in left:
            if not task.cancelling():  # a second cancellation would interrupt its closing
                task.cancel()
        if left:
            await asyncio.gather(*left, return_exceptions=True)


async def _play(
    factory: EnvironmentFactory,
    engine: RolloutEngine,
    chat: Chat,
    sampling: Sampling,
    context: EpisodeContext | None,
    max_turns: int,
    max_tokens: int | None,
    deadline: float | None,
    group: int,
) -> tuple[Episode, bool]:
    """Play one episode; return it, and whether it failed in a way that may pass."""
    if max_turns < 1:
        raise ValueError(f"max_turns must be at least 1, got {max_turns}")
    context = context or EpisodeContext("task", seed=sampling.seed)

    def begin(messages: Sequence[Message], tools: Sequence[Tool], agent: str) -> _Timed:
        seed = context.seed
        if agent and seed is not None:
            seed = derive_seed(seed, "agent", agent, len(play.conversations))
        limits = {"max_tokens": max_tokens, "budget": budget, "deadline": deadline}
        made = _Timed(play, engine, chat, sampling, messages, tools, agent=agent, seed=seed, **limits)
        play.conversations.append(made)
        return made

    def converse(messages: Sequence[Message], tools: Sequence[Tool] = (), agent: str = "sub") -> Conversation:
        if not agent:
            raise ValueError("name the agent of a conversation beside the episode's own")
        return begin(messages, as_tools(tools), agent)

    play, budget = _Play(replace(context, converse=converse), group), TokenBudget(max_tokens)
    try:
        end, score = await _in_environment(play, factory, engine, begin, max_turns, deadline)
        return play.ended(end, score, None), False
    except EpisodeFailed as failed:
        return play.ended("failed", None, failed.reason), failed.retryable
    finally:
        play.context, play.conversations = context, []  # no references in a circle, of which a step has thousands


class _Timed(Conversation):
    """A conversation that adds its sampling time and tool calls to an episode; its branches do so too."""

    def __init__(self, play: _Play, *arguments: Any, **options: Any) -> None:
        self._play = play
        self.tally = ToolStats()
        super().__init__(*arguments, **options)

    async def reply(self) -> Reply:
        start = time.monotonic()
        try:
            reply = await super().reply()
        finally:
            self._play.generate_s += time.monotonic() - start
        if reply.finished:
            self.tally.count_calls(((c.name, c.id) for c in reply.tool_calls), (tool.name for tool in self.tools))
        return reply

    def add_messages(self, messages: Sequence[Message]) -> bool:
        self.tally.count_results(messages)
        return super().add_messages(messages)

    def go_on_from(self, messages: Sequence[Message]) -> bool:
        self.tally.count_results(messages)
        return super().go_on_from(messages)

    def fork(self, agent: str) -> Conversation:
        branch = cast(_Timed, super().fork(agent))
        branch.tally = ToolStats()  # the calls so far are counted here
        self._play.conversations.append(branch)
        return branch


Begin = Callable[[Sequence[Message], Sequence[Tool], str], _Timed]


async def _in_environment(
    play: _Play,
    factory: EnvironmentFactory,
    engine: RolloutEngine,
    begin: Begin,
    max_turns: int,
    deadline: float | None,
) -> tuple[End, Score]:
    """Open the environment, play, score, and close it whatever happened."""
    environment = await play.ask(host(factory), "the environment's factory")
    whole = False
    try:
        with request_scope(engine):
            end = await _turns(play, environment, begin, max_turns, deadline)
        score = await play.ask(_checked(environment.finish(end), Score, environment, "finish"), "finish()")
        whole = True
    finally:
        problem = await _close(play, environment, None if getattr(factory, "instant", False) else CLOSE_TIMEOUT)
        if whole and problem:
            raise problem
    return end, score


async def _checked(answer: Awaitable[Any], kind: type[R], environment: Environment, method: str) -> R:
    return checked(await answer, kind, environment, method)


def request_scope(engine: RolloutEngine) -> AbstractContextManager[None]:
    """Return a context for turns that call an engine again and again: in rounds the engine waits for the next call."""
    tell = getattr(engine, "request_scope", None)
    return nullcontext() if tell is None else tell()


async def _close(play: _Play, environment: Environment, limit: float | None) -> EpisodeFailed | None:
    """Close the environment; return its failure instead of raising it, so that an earlier one is not lost."""
    try:
        await play.ask(environment.close(), "close()", None if limit is None else time.monotonic() + limit)
    except EpisodeFailed as failed:
        return failed
    except _DeadlinePassed:
        return EpisodeFailed(f"close() did not return within {limit:g} s", retryable=True)
    return None


async def _turns(play: _Play, environment: Environment, begin: Begin, max_turns: int, deadline: float | None) -> End:
    """Play turn by turn and return how the episode ended."""
    try:
        opened = _checked(environment.open(play.context), Observation, environment, "open")
        opening = await play.ask(opened, "open()", deadline)
        try:
            conversation = begin(opening.messages, opening.tools, "")
        except ValueError as error:
            raise EpisodeFailed(str(error), retryable=False) from error
        for turn in range(max_turns):
            limit = conversation.limit
            reply = await conversation.reply()
            stepped = _checked(environment.step(reply), StepResult, environment, "step")
            outcome = await play.ask(stepped, "step()", deadline)
            play.metrics.update(outcome.metrics)
            conversation.tally.count_results(outcome.messages)  # here, as a last turn's messages never reach the model
            reason = conversation.stop_reason
            if reason == "abort" or reason == "deadline":
                return reason
            if not reply.finished:
                return "max_tokens" if limit < conversation.max_new_tokens else "length"
            if outcome.done:
                return "limit" if outcome.cut_off else "done"
            if turn + 1 < max_turns and not _go_on(conversation, outcome):
                return "max_tokens"
    except _DeadlinePassed:
        return "deadline"
    except TokensSpentError:
        return "max_tokens"
    except EpisodeFailed as failed:
        if isinstance(failed.__cause__, TokensSpentError):  # a sub-agent's, and the environment let it pass
            return "max_tokens"
        raise
    return "max_turns"


def _go_on(conversation: Conversation, outcome: StepResult) -> bool:
    try:
        if outcome.context is not None:
            return conversation.go_on_from([*outcome.context, *outcome.messages])
        return conversation.add_messages(outcome.messages)
    except ValueError as error:
        raise EpisodeFailed(str(error), retryable=False) from error


async def score_together(factory: object, episodes: list[Episode]) -> list[Episode]:
    """Return the episodes with the scores of the factory's `score_group`, where it has one."""
    score_group = getattr(factory, "score_group", None)
    played = [e for e in episodes if e.score is not None]
    if score_group is None or not played:
        return episodes
    try:
        ended = await REWARDS.run("score_group", GROUP_SCORE_TIMEOUT, score_group, played)
        problem = f"score_group raised {error_text(ended.error)}" if ended.error is not None else None
        value = ended.value
        if problem is None and inspect.isawaitable(value):
            value = await value
    except (OverrunError, RefusedError) as error:
        problem, value = f"score_group: {error}", ()
    scores = list(value or ()) if problem is None else []
    if problem is None and (len(scores) != len(played) or not all(isinstance(s, Score) for s in scores)):
        problem = f"score_group gave {len(scores)} scores for {len(played)} episodes: it gives one Score each"
    new = {e.id: score for e, score in zip(played, scores, strict=False)} if problem is None else {}
    return [_rescored(e, new.get(e.id), problem) if e.score is not None else e for e in episodes]


def _rescored(episode: Episode, score: Score | None, problem: str | None) -> Episode:
    if problem is not None:
        return replace(episode, score=None, end="failed", error=problem)
    return replace(episode, score=score)
