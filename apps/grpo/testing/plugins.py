"""Plugins for tests: environments, rewards and tools, accepted and refused ones."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from chat_tools import Format, Json
from rollout import EpisodeContext, EpisodeFailed, Observation, Reply, Score, StepResult, TaskRow, Tool
from rollout.environments.environment import End
from rollout.tools.python_tool import python_tool
from rollout.tools.sandbox.sandbox import Sandbox
from rollout.tools.tool import ToolResult


class Digits:
    """An environment whose reward is the share of the reply's characters that are digits."""

    async def open(self, context: EpisodeContext) -> Observation:
        """Ask for the row's number, or for the task's own."""
        return Observation(({"role": "user", "content": f"say {context.data.get('number', 0)}"},))

    async def step(self, reply: Reply) -> StepResult:
        """Score the one turn."""
        self.share = sum(map(str.isdigit, reply.text)) / max(1, len(reply.text))
        return StepResult()

    async def finish(self, end: End) -> Score:
        """Return the share, and whether a limit ended it."""
        return Score(self.share, {"digits": self.share, "cut": float(end == "length")})

    async def close(self) -> None:
        """Do nothing."""


class TextDigits(Digits):
    """An environment with an option."""

    def __init__(self, word: str = "say") -> None:
        self.word = word

    async def open(self, context: EpisodeContext) -> Observation:
        """Ask in other words."""
        return Observation(({"role": "user", "content": f"{self.word} {context.data.get('number', 0)}"},))


class Numbers:
    """A source of tasks."""

    def __init__(self, held_out: int, first: int = 0) -> None:
        self.count, self.first = held_out, first

    def tasks(self, step: int, count: int) -> list[TaskRow]:
        """Return numbers that follow from the step."""
        return [TaskRow(f"{step}-{i}", {"number": self.first + i}) for i in range(count)]

    def held_out(self) -> list[TaskRow]:
        """Return other numbers."""
        return [TaskRow(f"held-out-{i}", {"number": -self.first - i}) for i in range(self.count)]


class Listed(Digits):
    """An environment that brings its tasks."""

    @staticmethod
    def rows() -> list[TaskRow]:
        """Return eight tasks."""
        return [TaskRow(f"n{number}", {"number": number}) for number in range(8)]


class Letters(Digits):
    """An environment whose reward is the share of ASCII characters."""

    async def step(self, reply: Reply) -> StepResult:
        """Score the one turn."""
        self.share = sum(map(str.isascii, reply.text)) / max(1, len(reply.text))
        return StepResult()


class Broken(Digits):
    """An environment whose step fails."""

    async def step(self, reply: Reply) -> StepResult:
        """Fail."""
        del reply
        raise EpisodeFailed("the maze collapsed\x1b[2J", retryable=False)


class Closed(Digits):
    """An environment that fails to open."""

    async def open(self, context: EpisodeContext) -> Observation:
        """Fail."""
        del context
        raise OSError("the door is locked")


class FailsToClose(Digits):
    """An environment that fails to close."""

    async def close(self) -> None:
        """Fail."""
        raise OSError("the door is stuck")


class Shut(Closed, FailsToClose):
    """An environment that fails to open and to close."""


class Strange(Digits):
    """An environment with a wrong type of opening."""

    async def open(self, context: EpisodeContext) -> Any:
        """Return messages alone."""
        del context
        return [{"role": "user", "content": "x"}]


class Halved:
    """An environment that lacks methods."""

    async def open(self, context: EpisodeContext) -> Observation:
        """Return a prompt."""
        del context
        return Observation(({"role": "user", "content": "x"},))


class NeedsArgument(Digits):
    """An environment that needs an argument."""

    def __init__(self, level: int) -> None:
        self.level = level


NUMBER = 3


def by_end(reply: Reply, end: End) -> float:
    """Return 1 for a response that ended by itself, and the share of ASCII characters, less 2, for a truncated one."""
    return 1.0 if end == "done" else sum(map(str.isascii, reply.text)) / max(1, len(reply.text)) - 2


def by_reference(reply: Reply, reference: str) -> float:
    """Return whether the reply holds the reference."""
    return float(reference in reply.text)


def by_length(reply: Reply, scale: float = 1.0) -> float:
    """Return the scaled length of the reply."""
    return scale * len(reply.text)


async def by_everything(reply: Reply, reference: str, row: Mapping[str, Any], results: Sequence[ToolResult]) -> Score:
    """Return a reward with components from each argument."""
    del reference
    return Score(float(len(reply.text)), {"row": float(len(row)), "results": float(len(results))})


def by_others(completion: str, solution: str) -> float:
    """Compare with the argument names of another trainer."""
    return float(completion == solution)


def boxed() -> Tool:
    """Return a Python tool in bubblewrap's sandbox."""
    return python_tool(Sandbox(backend="bubblewrap"))


def echo(name: str = "echo") -> Tool:
    """Return a tool that repeats its text."""
    text = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    return Tool(name, "Says it again.", text, run=lambda text: text)


def marked(begin: str = "<call>") -> Format:
    """Return a format of tool calls."""
    return Format("marked", calls=((begin, "</call>"),), body=Json(), ends=("<|im_end|>",))


SLOW = Tool("slow", "Never answers.", {"type": "object"}, run=lambda: time.sleep(60), timeout=0.05)
