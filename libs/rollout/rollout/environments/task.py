"""The environment that most tasks need: messages, tools, and a reward for the completion."""

import inspect
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypedDict

from rollout.chat.messages import Message, Reply
from rollout.environments.environment import End, EpisodeContext, Observation, Score, StepResult
from rollout.errors import EpisodeFailed
from rollout.tools.tool import EpisodeTools, Tool, ToolResult, as_tools, call_id, call_tools
from rollout.tools.workers import REWARDS, OverrunError, RefusedError

Reward = Callable[..., float | Score | Awaitable[float | Score]]
"""Function that scores a reply, given the results of all tool calls; it may block, or be async."""


class RewardArguments(TypedDict, total=False):
    """Keyword arguments that a reward may ask for."""

    end: End


@dataclass(frozen=True)
class Task:
    """Messages, tools and a reward; called, it makes the environment of one episode.

    A turn with tool calls is answered with their results, all calls of a turn side by side; the first turn without ends
    the episode and `reward(reply, tool_results)` scores it, in a thread of its own (`rollout.tools.workers.instant`
    marks one that cannot block). A turn with an unreadable call gets the reason as its result, and may be tried again.
    An episode that a limit ended scores `cut_off_reward`, or by the reward function where that is None; with
    `reward_takes_end` the function gets how the episode ended as the keyword `end`. A reward that takes longer than
    `reward_timeout` seconds fails the episode, to be tried again.
    """

    instant: ClassVar[bool] = True  # tools and rewards have threads of their own, the rest can't block
    messages: tuple[Message, ...]
    reward: Reward
    tools: tuple[Tool, ...] = ()
    cut_off_reward: float | None = 0.0
    reward_timeout: float = 60.0
    reward_takes_end: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "tools", as_tools(self.tools))
        if not callable(self.reward):
            raise ValueError(f"the reward of a task is a {type(self.reward).__name__}: give a function of a reply")

    def __call__(self) -> "TaskEnvironment":
        """Return an episode of this task."""
        return TaskEnvironment(self)


class TaskEnvironment:
    """One episode of a Task; keeps the last reply and the tool results for the reward."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._episode_tools = EpisodeTools(task.tools)
        self._names = {tool.name for tool in task.tools}  # calls of unknown tools get no row in tables
        self._results: list[ToolResult] = []
        self._reply = Reply("", "", finished=False)

    async def open(self, context: EpisodeContext) -> Observation:
        """Return the task's messages and tools."""
        del context
        return Observation(self._task.messages, self._episode_tools.tools)

    async def step(self, reply: Reply) -> StepResult:
        """Run the tool calls of a finished turn, or end the episode."""
        self._reply = reply
        if not (reply.finished and self._task.tools and (reply.tool_calls or reply.problems)):
            return StepResult(metrics=self._metrics())
        answers = await call_tools(self._episode_tools.tools, reply.tool_calls)
        self._results += answers
        messages = [answer.to_message() for answer in answers]
        for number, problem in enumerate(reply.problems, len(self._results)):
            text = f"Error: a tool call could not be read: {problem}"
            # templates need an id and a name of each result, also where the model gave none
            messages.append(ToolResult("unreadable", text, False, call_id(number)).to_message())
        return StepResult(tuple(messages), done=False, metrics=self._metrics())

    async def finish(self, end: End) -> Score:
        """Return the reward function's score of the last reply; `cut_off_reward` where a limit ended the episode."""
        task = self._task
        if end != "done" and task.cut_off_reward is not None:
            return Score(task.cut_off_reward)
        reward_arguments: RewardArguments = {"end": end} if task.reward_takes_end else {}
        return await score_of(
            task.reward,
            self._reply,
            tuple(self._results),
            timeout=task.reward_timeout,
            reward_arguments=reward_arguments,
        )

    async def close(self) -> None:
        """End what its tools kept for the episode, which does not block."""
        self._episode_tools.close()

    def _metrics(self) -> dict[str, float]:
        if not self._task.tools:
            return {}
        errors = sum(not result.ok for result in self._results)
        metrics: dict[str, float] = {"tool_calls": len(self._results), "tool_errors": errors}
        for name in dict.fromkeys(result.name for result in self._results if result.name in self._names):
            mine = [result for result in self._results if result.name == name]
            metrics[f"tool/{name}/calls"] = len(mine)
            metrics[f"tool/{name}/errors"] = sum(not result.ok for result in mine)
            metrics[f"tool/{name}/timeouts"] = sum(result.timed_out for result in mine)
        return metrics


NO_ARGUMENTS: RewardArguments = {}


async def score_of(
    reward: Reward,
    reply: Reply,
    results: Sequence[ToolResult],
    *,
    timeout: float = 60.0,
    reward_arguments: RewardArguments = NO_ARGUMENTS,
) -> Score:
    """Call a reward function where it can't block sampling; what it raises is raised here.

    Raises:
        EpisodeFailed: it returned nothing in time, or too many of its earlier calls still run; both may be tried again.
            It returned a text, or raised what would end the program; tried again, it would do the same.
    """
    name = getattr(reward, "__qualname__", type(reward).__qualname__)
    try:
        ended = await REWARDS.run(name, timeout, reward, reply, results, **reward_arguments)
    except OverrunError:
        raise EpisodeFailed(f"the reward {name} gave no answer within {timeout:g} s", retryable=True) from None
    except RefusedError as refused:
        raise EpisodeFailed(f"the reward {name} is refused: {refused}", retryable=True) from None
    if isinstance(ended.error, Exception):
        raise ended.error
    if ended.error is not None:  # SystemExit and the like must not end the run
        reason = f"the reward {name} raised {type(ended.error).__name__}: {ended.error}"
        raise EpisodeFailed(reason, retryable=False) from ended.error
    value = await ended.value if inspect.isawaitable(ended.value) else ended.value
    if isinstance(value, str):
        raise EpisodeFailed(f"the reward {name} gave the text {value!r:.80}: give a number or a Score", retryable=False)
    return value if isinstance(value, Score) else Score(float(value))
