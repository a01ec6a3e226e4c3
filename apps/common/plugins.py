"""Plugins of a user: environments, rewards, tools and tasks, each named as FILE.py:NAME or package.module:name.

- An environment is a class (or any callable) that makes the environment of one episode (`rollout.Environment`). Its
  tasks are the rows of `--tasks`; without it they are numbered, and an environment draws what it needs from its seed.
- A reward is a function whose arguments are some of `reply`, `reference`, `row`, `results`, `end`, by these names; it
  gives a number or a `rollout.Score`, may block or be async. One that names `end` ("done", "length", "max_tokens", ...)
  scores answers that a limit cut off too; without it they earn 0.
- A reward function or an environment may declare `held_out_metric`, "accuracy" or "score": what its mean over held-out
  tasks is called. Without it a run calls it accuracy where every reward of its first evaluation is 0 or 1.
- A tool is a `rollout.Tool`, a function without arguments that makes one, or a function with typed arguments, which the
  model calls.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rollout import Reply, Score, Tool
from rollout.environments.environment import End
from rollout.environments.load_object import load_object
from rollout.tools.sandbox.sandbox import SandboxRefusedError
from rollout.tools.tool import ToolResult, as_tools

METHODS = ("open", "step", "finish", "close")
REWARD_ARGUMENTS = ("reply", "reference", "row", "results", "end")
Scored = float | Score | Awaitable[float | Score]


class RowReward(Protocol):
    """A reward of the response to a row of a file."""

    def __call__(self, reply: Reply, reference: str, row: Mapping[str, Any], results: Sequence[ToolResult]) -> Scored:
        """Return the reward, or an awaitable of it."""
        ...


@dataclass(frozen=True)
class NamedReward:
    """A user's reward function, called with the arguments that it takes; other ranks load it by its name."""

    spec: str

    @property
    def takes_end(self) -> bool:
        """Whether the user's function takes `end`, and so scores truncated responses."""
        return "end" in _arguments(self.spec, load_object(self.spec, "reward"))

    @property
    def held_out_metric(self) -> str | None:
        """What the user's function declares that its mean is called: "accuracy" or "score"; None: nothing."""
        return getattr(load_object(self.spec, "reward"), "held_out_metric", None)

    def __call__(
        self,
        reply: Reply,
        reference: str,
        row: Mapping[str, Any],
        results: Sequence[ToolResult],
        end: End = "done",
    ) -> Scored:
        """Return the result of the user's function."""
        function = load_object(self.spec, "reward")
        arguments = {"reply": reply, "reference": reference, "row": row, "results": results, "end": end}
        result: Scored = function(**{name: arguments[name] for name in _arguments(self.spec, function)})
        return result


def load_reward(spec: str) -> NamedReward:
    """Return the reward that a spec names.

    Raises:
        ValueError: there is none, it can't be called, or it takes other arguments.
    """
    function = load_object(spec, "reward")
    if not callable(function):
        raise ValueError(f"--reward {spec} is a {type(function).__name__}; a function is needed")
    _arguments(spec, function)
    return NamedReward(spec)


def _arguments(spec: str, function: Callable[..., Any]) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    wanted = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return [name for name in REWARD_ARGUMENTS if name != "end" or name in wanted]
    named = [name for name in wanted if name in REWARD_ARGUMENTS]
    others = [p.name for p in parameters if p.name not in REWARD_ARGUMENTS and p.default is p.empty]
    if others or not named:
        raise ValueError(
            f"--reward {spec} takes ({', '.join(wanted)}): name its arguments {', '.join(REWARD_ARGUMENTS)}, as many "
            "of them as it needs"
        )
    return named


def load_tools(specs: Sequence[str]) -> tuple[Tool, ...]:
    """Return the tools that specs name.

    Raises:
        ValueError: there is none of a name, it is no tool and makes none, its arguments can't be described, two have
            one name, or the kernel refuses its sandbox.
    """
    tools: list[Tool] = []
    for spec in specs:
        tool = load_object(spec, "tool")
        if not isinstance(tool, Tool) and callable(tool):
            tool = _tool_of(spec, tool)
        if not isinstance(tool, Tool):
            raise ValueError(f"--tool {spec} is a {type(tool).__name__}: a rollout.Tool, or a function that makes one")
        if any(tool.name == other.name for other in tools):
            raise ValueError(f"--tool {spec}: a tool is called {tool.name!r} already; rename one of the two")
        tools.append(tool)
    return tuple(tools)


def _tool_of(spec: str, function: Callable[..., Any]) -> Any:
    """Return the tool that a function makes where it needs no arguments, else the one that it is."""
    needed = _needed(function)
    try:
        if needed and set(needed) <= set(REWARD_ARGUMENTS):
            raise ValueError("these are the arguments of a reward, which --reward names")
        return as_tools([function])[0] if needed else _made(function)
    except SandboxRefusedError as refused:
        raise ValueError(f"--tool {spec}: {refused}") from refused
    except ValueError as error:
        if not needed:
            raise
        raise ValueError(
            f"--tool {spec} takes ({', '.join(needed)}): name a rollout.Tool(name, description, schema, function), a "
            f"function without arguments that makes one, or one whose arguments have types ({error})"
        ) from error


def _needed(function: Callable[..., Any]) -> list[str]:
    """Return the arguments without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of some functions in C nobody knows
        return []
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


@functools.cache
def _made(make: Callable[[], Any]) -> Any:
    """Return the tool that a user's function makes, once a process: it may hold a server of its own."""
    return make()


def environment_name(spec: str) -> str:
    """Return an environment's name in tables and columns: the last part of its spec."""
    return spec.rpartition(":")[2].rpartition(".")[2] or spec


def load_environment(spec: str) -> Callable[[], Any]:
    """Return the factory that a spec names.

    Raises:
        ValueError: there is none, it can't be called, or a class lacks one of the methods.
    """
    factory: Any = load_object(spec, "environment")
    if not callable(factory):
        raise ValueError(f"--environment {spec} is a {type(factory).__name__}: a class, or a callable that makes one")
    if inspect.isclass(factory):
        missing = [name for name in METHODS if not inspect.iscoroutinefunction(getattr(factory, name, None))]
        if missing:
            raise ValueError(
                f"--environment {spec}: {factory.__name__} has no async method {', '.join(missing)}; an environment "
                f"has async {', '.join(METHODS)} (rollout.Environment)"
            )
        needed = [
            p.name
            for p in inspect.signature(factory).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if needed:
            raise ValueError(
                f"--environment {spec}: {factory.__name__} wants {', '.join(needed)} to be made; name a function that "
                "makes it without arguments (what differs from task to task is in the context of open)"
            )
    made: Callable[[], Any] = factory
    return made
