"""What an agent acts in: a task that starts sessions, and an episode's session that answers the model turn by turn."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollout.tools import Tool, ToolResult, call_tool

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it; `arguments` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """One assistant turn, read. `problems` are the reasons why parts of it could not be read as tool calls.

    `text` is everything the model wrote, `content` what remains for the user, `reasoning` its thinking. `finished`
    is False when the token limit cut the turn off.
    """

    text: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    finished: bool = True


@dataclass(frozen=True)
class Outcome:
    """What follows a reply: messages to the model, a reward for this turn, whether the episode is over."""

    messages: tuple[Message, ...] = ()
    reward: float = 0.0
    done: bool = True
    metadata: Mapping[str, Any] = field(default_factory=dict)


class EpisodeSession(Protocol):
    """One episode's own state."""

    @property
    def messages(self) -> Sequence[Message]:
        """The opening messages."""
        ...

    @property
    def tools(self) -> Sequence[Tool]:
        """What the model may call."""
        ...

    async def step(self, reply: Reply) -> Outcome:
        """Answer one reply."""
        ...


class Environment(Protocol):
    """A task. It holds no episode state, so that a group of episodes can run at once."""

    def start(self) -> EpisodeSession:
        """A fresh episode."""
        ...


Reward = Callable[[Reply, Sequence[ToolResult]], float]


@dataclass(frozen=True)
class Task:
    """Messages, tools and a reward: the environment most tasks need.

    A turn with tool calls is answered with their results; the first turn without ends the episode and
    `reward(reply, tool_results)` scores it. A turn that holds an unreadable call is told so, and may be tried again. A
    turn cut off by the token limit scores `cut_off_reward`.
    """

    messages: tuple[Message, ...]
    reward: Reward
    tools: tuple[Tool, ...] = ()
    cut_off_reward: float = 0.0

    def start(self) -> "TaskSession":
        """A fresh episode of this task."""
        return TaskSession(self)


class TaskSession:
    """One episode of a Task; keeps the tool results for the reward."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._results: list[ToolResult] = []

    @property
    def messages(self) -> Sequence[Message]:
        """The task's messages."""
        return self._task.messages

    @property
    def tools(self) -> Sequence[Tool]:
        """The task's tools."""
        return self._task.tools

    async def step(self, reply: Reply) -> Outcome:
        """Run the calls, or score the answer."""
        if not reply.finished:
            return Outcome(reward=self._task.cut_off_reward, metadata=self._metadata())
        if self._task.tools and (reply.tool_calls or reply.problems):
            answers = [await call_tool(self._task.tools, call.name, call.arguments) for call in reply.tool_calls]
            self._results += answers
            texts = [a.content for a in answers]
            texts += [f"Error: a tool call could not be read: {problem}" for problem in reply.problems]
            return Outcome(
                messages=tuple({"role": "tool", "content": t} for t in texts), done=False, metadata=self._metadata()
            )
        return Outcome(reward=float(self._task.reward(reply, tuple(self._results))), metadata=self._metadata())

    def _metadata(self) -> dict[str, int]:
        return {"tool_calls": len(self._results), "tool_errors": sum(not r.ok for r in self._results)}
