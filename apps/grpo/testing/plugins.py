"""What a user's own file may hold, for tests: environments, rewards and tools of kinds that are taken or refused."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollout import EpisodeContext, EpisodeFailed, Opening, Outcome, Reply, Score, TaskRow, Tool
from rollout.environments.environment import End
from rollout.tools.python_tool import python_tool
from rollout.tools.sandbox.sandbox import Sandbox
from rollout.tools.tool import ToolResult


class Digits:
    """Earns the share of the reply's characters that are digits."""

    async def open(self, context: EpisodeContext) -> Opening:
        """Ask for the row's number, or for the task's own."""
        return Opening(({"role": "user", "content": f"say {context.data.get('number', 0)}"},))

    async def step(self, reply: Reply) -> Outcome:
        """Return one turn."""
        self.share = sum(map(str.isdigit, reply.text)) / max(1, len(reply.text))
        return Outcome()

    async def finish(self, end: End) -> Score:
        """Return the share, and whether a limit ended it."""
        return Score(self.share, {"digits": self.share, "cut": float(end == "length")})

    async def close(self) -> None:
        """Nothing is held."""


class Listed(Digits):
    """Brings its tasks."""

    @staticmethod
    def rows() -> list[TaskRow]:
        """Eight of them."""
        return [TaskRow(f"n{number}", {"number": number}) for number in range(8)]


class Letters(Digits):
    """Earns the share of ASCII characters."""

    async def step(self, reply: Reply) -> Outcome:
        """Return one turn."""
        self.share = sum(map(str.isascii, reply.text)) / max(1, len(reply.text))
        return Outcome()


class Broken(Digits):
    """Cannot go on."""

    async def step(self, reply: Reply) -> Outcome:
        """Fail."""
        del reply
        raise EpisodeFailed("the maze collapsed\x1b[2J", retryable=False)


class Closed(Digits):
    """Cannot be opened."""

    async def open(self, context: EpisodeContext) -> Opening:
        """Fail."""
        del context
        raise OSError("the door is locked")


class Stuck(Digits):
    """Cannot be closed."""

    async def close(self) -> None:
        """Fail."""
        raise OSError("the door is stuck")


class Shut(Closed, Stuck):
    """Neither."""


class Strange(Digits):
    """Opens with something else."""

    async def open(self, context: EpisodeContext) -> Any:
        """Return messages alone."""
        del context
        return [{"role": "user", "content": "x"}]


class Halved:
    """Lacks methods."""

    async def open(self, context: EpisodeContext) -> Opening:
        """Return nothing more."""
        del context
        return Opening(({"role": "user", "content": "x"},))


class Demanding(Digits):
    """Wants something to be made."""

    def __init__(self, level: int) -> None:
        self.level = level


NUMBER = 3


def by_end(reply: Reply, end: End) -> float:
    """1 for an answer that ended by itself, the share of ASCII characters, less 2, for one that was cut off."""
    return 1.0 if end == "done" else sum(map(str.isascii, reply.text)) / max(1, len(reply.text)) - 2


def by_reference(reply: Reply, reference: str) -> float:
    """Return whether the reply holds the reference."""
    return float(reference in reply.text)


async def by_everything(reply: Reply, reference: str, row: Mapping[str, Any], results: Sequence[ToolResult]) -> Score:
    """Return all that a reward can know, in parts."""
    del reference
    return Score(float(len(reply.text)), {"row": float(len(row)), "results": float(len(results))})


def by_others(completion: str, solution: str) -> float:
    """Return another trainer's names."""
    return float(completion == solution)


def boxed() -> Tool:
    """Python, where bubblewrap is installed."""
    return python_tool(Sandbox(backend="bubblewrap"))


def echo() -> Tool:
    """Return a tool that says what it is told."""
    text = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    return Tool("echo", "Says it again.", text, run=lambda text: text)


SLOW = Tool("slow", "Never answers.", {"type": "object"}, run=lambda: time.sleep(60), timeout=0.05)
