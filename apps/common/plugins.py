"""Plugins of a user: environments, rewards, tools and tasks, each named as FILE.py:NAME or package.module:name.

- An environment is a class (or any callable) that makes the environment of one episode (`rollout.Environment`). Its
  tasks are the rows of `--tasks`; without it they are numbered, and an environment draws what it needs from its seed.
- A reward is a function whose arguments are some of `reply`, `reference`, `row`, `results`, `end`, by these names; it
  gives a number or a `rollout.Score`, may block or be async. Its other arguments are options. One that names
  `end` ("done", "length", "max_tokens", ...) scores answers that a limit cut off too; without it they earn 0.
- A reward function or an environment may declare `held_out_metric`, "accuracy" or "score": what its mean over held-out
  tasks is called. Without it a run calls it accuracy where every reward of its first evaluation is 0 or 1.
- A tool is a `rollout.Tool`, a function without required arguments that makes one, or a function with typed arguments,
  which the model calls.

An environment's, a reward's and a tool maker's arguments with defaults are options (`seqpack.extensions.options`). Of
several environments or tools each gets those that it takes.
"""

import functools
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from rollout import Reply, Score, Tool
from rollout.environments.environment import End
from rollout.tools.sandbox.sandbox import SandboxRefusedError
from rollout.tools.tool import ToolResult, as_tools
from seqpack.extensions.load_object import load_object
from seqpack.extensions.options import bound, read_options, split_words

METHODS = ("open", "step", "finish", "close")
SESSION_TOOLS = {
    "shell": "rollout.tools.session_tools:shell_tool",
    "python": "rollout.tools.session_tools:python_session_tool",
}
"""Makers of the tools that have a name of their own."""
MCP = "mcp:"  # before the command of an MCP server, all of whose tools are meant
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
    options: tuple[str, ...] = ()
    """NAME=VALUE words of its other arguments."""

    @property
    def function(self) -> Callable[..., Any]:
        """The user's function with its options."""
        return bound("--reward-options", self.spec, load_object(self.spec, "reward"), self.options, REWARD_ARGUMENTS)

    @property
    def takes_end(self) -> bool:
        """Whether the user's function takes `end`, and so scores truncated responses."""
        return "end" in _arguments(self.spec, self.function)

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
        function = self.function
        arguments = {"reply": reply, "reference": reference, "row": row, "results": results, "end": end}
        result: Scored = function(**{name: arguments[name] for name in _arguments(self.spec, function)})
        return result


def load_reward(spec: str, options: Sequence[str] = ()) -> NamedReward:
    """Return the reward that a spec names, with NAME=VALUE options.

    Raises:
        ValueError: there is none, it can't be called, it takes other arguments, or not these options.
    """
    function = load_object(spec, "reward")
    if not callable(function):
        raise ValueError(f"--reward {spec} is a {type(function).__name__}; a function is needed")
    if not options:
        _arguments(spec, function)
    reward = NamedReward(spec, tuple(options))
    _arguments(spec, reward.function)
    return reward


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
            "of them as it needs; --reward-options gives others as NAME=VALUE"
        )
    return named


def load_tools(specs: Sequence[str], options: Sequence[str] = ()) -> tuple[Tool, ...]:
    """Return the tools that specs name ("mcp:COMMAND": all of a server's; "shell" and "python": in the sandbox).

    Of the NAME=VALUE options each maker gets those that it takes.

    Raises:
        ValueError: there is none of a name, it is no tool and makes none, its arguments can't be described, two have
            one name, no maker takes an option, or the kernel refuses its sandbox.
    """
    tools: list[Tool] = []
    for spec, tool in _with_options(specs, options):
        if not isinstance(tool, Tool) and callable(tool):
            tool = _tool_of(spec, tool)
        if not isinstance(tool, Tool):
            raise ValueError(f"--tool {spec} is a {type(tool).__name__}: a rollout.Tool, or a function that makes one")
        if any(tool.name == other.name for other in tools):
            raise ValueError(f"--tool {spec}: a tool is called {tool.name!r} already; rename one of the two")
        tools.append(tool)
    return tuple(tools)


def _named(spec: str) -> list[tuple[str, Any]]:
    if spec in SESSION_TOOLS:
        return [(spec, load_object(SESSION_TOOLS[spec], "tool"))]
    if not spec.startswith(MCP):
        return [(spec, load_object(spec, "tool"))]
    if find_spec("rollout.tools.mcp_tools") is None:
        raise ValueError(
            f"--tool {spec}: tools of MCP servers need the package mcp: `./bazelw run //apps/grpo:adapters` has it, or "
            "pip install 'tessera-rollout[mcp]'"
        )
    made = load_object("rollout.tools.mcp_tools:mcp_tools", "tool")
    return [(spec, tool) for tool in made(spec.removeprefix(MCP))]


def _with_options(specs: Sequence[str], options: Sequence[str]) -> list[tuple[str, Any]]:
    """Return what each spec of a tool names, a maker with its options."""
    tools = [pair for spec in specs for pair in _named(spec)]
    if not options:
        return tools
    makers = {spec: tool for spec, tool in tools if callable(tool) and not _needed(tool)}
    if not makers:
        raise ValueError(f"--tool-options {options[0]} has no effect: no tool is a function that makes one")
    words = split_words(makers, options)
    made = {spec: bound("--tool-options", spec, make, words[spec]) for spec, make in makers.items()}
    return [(spec, made.get(spec, tool)) for spec, tool in tools]


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


class _WithOptions:
    """A factory with options: it has the factory's attributes (`timeout`, `rows`, `held_out_metric`, ...)."""

    def __init__(self, factory: Callable[..., Any], values: Mapping[str, Any]) -> None:
        self.__wrapped__, self._values = factory, values

    def __call__(self) -> Any:
        return self.__wrapped__(**self._values)

    def __getattr__(self, name: str) -> Any:
        if name in ("__wrapped__", "_values"):  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)


@dataclass(frozen=True)
class LoadEnvironment:
    """What loads an environment by its spec, with the options that it takes; other processes get it as it is."""

    options: Mapping[str, tuple[str, ...]]
    """NAME=VALUE words by spec."""

    def __call__(self, spec: str) -> Callable[[], Any]:
        """Return the factory that a spec names."""
        return load_environment(spec, self.options.get(spec, ()))


def environment_loader(specs: Sequence[str], options: Sequence[str]) -> LoadEnvironment:
    """Return what loads environments with options: each gets those that it takes.

    Raises:
        ValueError: an environment can't be loaded, or none of them takes an option.
    """
    words = split_words({spec: load_object(spec, "environment") for spec in specs}, options) if options else {}
    load = LoadEnvironment(words)
    for spec in specs:
        load(spec)
    return load


def load_environment(spec: str, options: Sequence[str] = ()) -> Callable[[], Any]:
    """Return the factory that a spec names, with NAME=VALUE options.

    Raises:
        ValueError: there is none, it can't be called, a class lacks one of the methods, or it takes other options.
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
        given = {word.partition("=")[0] for word in options}
        needed = [name for name in needed if name not in given]
        if needed:
            raise ValueError(
                f"--environment {spec}: {factory.__name__} wants {', '.join(needed)} to be made; name a function that "
                "makes it without arguments (what differs from task to task is in the context of open), or give them "
                "as --environment-options NAME=VALUE"
            )
    if not options:
        made: Callable[[], Any] = factory
        return made
    return _WithOptions(factory, read_options("--environment-options", spec, factory, options))
