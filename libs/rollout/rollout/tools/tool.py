"""Tools that a model may call.

Errors that a model can cause or act upon are its tool result: an unknown tool, arguments that can't be read, whatever
the tool raises, a time limit. Failures of the run fail the episode (`EpisodeFailed`): a tool that raises it, memory
that ran out, a tool whose earlier calls all hang. Neither stops the run, and neither blocks it: a tool's code runs in
`workers.TOOLS`, never on the event loop or in an executor of sampling's.
"""

import asyncio
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from chat_tools import function_schema
from rollout.errors import EpisodeFailed
from rollout.tools.workers import TOOLS, OverrunError, RefusedError

_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it; `arguments` is JSON text. The result has the same `id`; see `call_id`."""

    name: str
    arguments: str
    id: str = ""


def call_id(number: int) -> str:
    """Return the id of a conversation's call of this number: nine letters and digits, as Mistral's templates need."""
    return f"call{number:05d}"


@dataclass(frozen=True)
class Tool:
    """A function offered to the model.

    `parameters` is the JSON schema of its arguments (an object). `run(**arguments)` blocks or is async, and returns
    text, or anything that json can write. It runs in a thread, an async one on an event loop of its own (so it can't
    share a client that is bound to another loop); a function marked `workers.instant` runs where it is called. After
    `timeout` seconds the call fails. Of longer results the first and last `max_characters` / 2 stay.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    run: Callable[..., Any]
    timeout: float = 30.0
    max_characters: int = 10_000
    schema: dict[str, Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.parameters.get("type") != "object":
            raise ValueError(f'tool {self.name}: parameters must be a JSON schema of type "object"')
        if not self.timeout > 0:
            raise ValueError(f"tool {self.name}: timeout must be more than 0 seconds, got {self.timeout}")
        if self.max_characters < 1:
            raise ValueError(f"tool {self.name}: max_characters must be at least 1, got {self.max_characters}")
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        object.__setattr__(self, "schema", {"type": "function", "function": function})


class Closing(Protocol):
    """What an episode keeps for its tools."""

    def close(self) -> None:
        """Release it, without blocking."""
        ...


@dataclass(frozen=True)
class EpisodeTool(Tool):
    """A tool whose calls share something that lasts an episode, such as a session in a sandbox.

    `run(kept, **arguments)` gets what `opens()` returned at the episode's first call; tools with an equal `opens` share
    it, and their calls run one after the other, in the order in which the model wrote them. A `Task` opens and closes
    it; other environments by `EpisodeTools`.
    """

    opens: Callable[[], Closing] = field(kw_only=True)


class EpisodeTools:
    """The tools of one episode: those that share what the episode keeps are bound to it. `close` releases it."""

    def __init__(self, tools: Iterable[Tool]) -> None:
        self._kept: dict[Callable[[], Closing], _Kept] = {}
        self.tools = tuple(self._bound(tool) if isinstance(tool, EpisodeTool) else tool for tool in tools)

    def _bound(self, tool: EpisodeTool) -> EpisodeTool:
        return replace(tool, run=_Bound(self._kept.setdefault(tool.opens, _Kept(tool.opens)), tool.run))

    def close(self) -> None:
        """Release all that was opened; later calls fail the episode."""
        for kept in self._kept.values():
            kept.close()


class _Kept:
    """What an episode keeps, opened when it is first asked for."""

    def __init__(self, opens: Callable[[], Closing]) -> None:
        self._opens, self._lock = opens, threading.Lock()
        self._value: Closing | None = None
        self._is_closed = False

    def get(self) -> Closing:
        """Return it. Raise EpisodeFailed where the episode is over."""
        with self._lock:
            if self._is_closed:
                raise EpisodeFailed("a tool was called after its episode's end", retryable=False)
            if self._value is None:
                self._value = self._opens()
            return self._value

    def close(self) -> None:
        """Close it, if it was opened."""
        with self._lock:
            self._is_closed = True
            if self._value is not None:
                self._value.close()


class _Bound:
    """The function of an episode's tool."""

    def __init__(self, kept: _Kept, run: Callable[..., Any]) -> None:
        self._kept, self._run = kept, run

    def __call__(self, **arguments: Any) -> Any:
        return self._run(self._kept.get(), **arguments)


def as_tools(tools: Iterable[Tool | Callable[..., Any]]) -> tuple[Tool, ...]:
    """Return the tools, with a `Tool` of each plain function: its name, docstring and types say the rest.

    Raises:
        ValueError: one is neither, or an argument of a function has no type that can be described; the text says which.
    """
    return tuple(tool if isinstance(tool, Tool) else _tool_of(tool) for tool in tools)


def _tool_of(function: Any) -> Tool:
    if not callable(function):
        raise ValueError(
            f"a tool is a {type(function).__name__}: give a rollout.Tool(name, description, parameters, run), or a "
            "function with types and a docstring"
        )
    described = function_schema(function)["function"]
    return Tool(described["name"], described["description"], described["parameters"], function)


@dataclass(frozen=True)
class ToolResult:
    """The text for the model, whether the call worked, and whether it timed out."""

    name: str
    content: str
    ok: bool
    call_id: str | None = None
    timed_out: bool = False

    def to_message(self) -> dict[str, str]:
        """Return the tool message of the result, with the call's id and the tool's name as templates need them."""
        message = {"role": "tool", "name": self.name, "content": self.content}
        return message if self.call_id is None else {**message, "tool_call_id": self.call_id}


async def call_tool(tools: Sequence[Tool], name: str, arguments: str, call_id: str | None = None) -> ToolResult:
    """Run the named tool on arguments given as JSON text.

    The result's text says what the model or the tool did wrong. Raises EpisodeFailed, to be tried again, where the run
    is at fault: the tool raises it or runs out of memory, or too many of its earlier calls still hang.
    """
    tools = as_tools(tools)
    tool = next((t for t in tools if t.name == name), None)
    if tool is None:
        known = ", ".join(t.name for t in tools) or "none"
        return ToolResult(name, f"Error: there is no tool {name!r}; available: {known}", False, call_id)
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        return ToolResult(name, f"Error: the arguments are not valid JSON: {error}", False, call_id)
    problem = _argument_problem(tool, parsed)
    if problem:
        return ToolResult(name, f"Error: {problem}", False, call_id)
    try:
        ok, text = await _run(tool, parsed)
    except OverrunError:
        return ToolResult(
            name, f"Error: {name} gave no answer within {tool.timeout:g} s", False, call_id, timed_out=True
        )
    text = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates, which no tokenizer takes
    if len(text) > tool.max_characters:
        half, more = tool.max_characters // 2, len(text) - tool.max_characters
        text = f"{text[: len(text) - half - more]} [{more} characters cut] {text[len(text) - half :]}"
    return ToolResult(name, text, ok, call_id)


async def call_tools(tools: Sequence[Tool], calls: Sequence[ToolCall]) -> list[ToolResult]:
    """Run a turn's calls side by side (those of an `EpisodeTool` in order); the results are in the order of the calls.

    Where one raises EpisodeFailed the others are cancelled, and it is raised when they are gone.
    """
    opens = {tool.name: tool.opens for tool in as_tools(tools) if isinstance(tool, EpisodeTool)}
    running: list[asyncio.Task[ToolResult]] = []
    last: dict[Callable[[], Closing] | None, asyncio.Task[ToolResult]] = {}
    for call in calls:
        before = last.get(opens.get(call.name))
        running.append(asyncio.ensure_future(_call_after(before, tools, call)))
        if call.name in opens:
            last[opens[call.name]] = running[-1]
    try:
        return list(await asyncio.gather(*running))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _call_after(before: "asyncio.Task[ToolResult] | None", tools: Sequence[Tool], call: ToolCall) -> ToolResult:
    """Run a call once the one before it has ended, whatever came of it."""
    if before is not None:
        await asyncio.wait([before])
    return await call_tool(tools, call.name, call.arguments, call.id or None)


async def _run(tool: Tool, arguments: dict[str, Any]) -> tuple[bool, str]:
    """Run the tool; return whether the call worked, and its text. Raise OverrunError past its time limit."""
    if isinstance(tool, EpisodeTool) and not isinstance(tool.run, _Bound):
        reason = f"tool {tool.name} lasts an episode: its environment has to bind it by rollout.tools.tool.EpisodeTools"
        raise EpisodeFailed(reason, retryable=False)
    try:
        ended = await TOOLS.run(tool.name, tool.timeout, _textual(tool.run), **arguments)
    except RefusedError as refused:
        raise EpisodeFailed(f"tool {tool.name} is refused: {refused}", retryable=True) from None
    if isinstance(ended.error, EpisodeFailed):
        raise ended.error
    if isinstance(ended.error, MemoryError):
        raise EpisodeFailed(f"tool {tool.name} ran out of memory", retryable=True) from ended.error
    if ended.error is not None:
        return False, f"Error: {type(ended.error).__name__}: {_words(ended.error)}"
    return True, ended.value


def _textual(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the tool's function with its result as text, made in the same thread: large results take time."""

    def textual(**arguments: Any) -> Any:
        answer = run(**arguments)
        return _text_of(answer) if inspect.isawaitable(answer) else _as_text(answer)

    textual.instant = getattr(run, "instant", False)  # type: ignore[attr-defined]
    return textual


def _words(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as worse:  # noqa: BLE001  somebody else's __str__
        return f"(its text can't be had: {type(worse).__name__})"


async def _text_of(answer: Awaitable[Any]) -> str:
    return _as_text(await answer)


def _as_text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _argument_problem(tool: Tool, arguments: Any) -> str | None:
    """Return what is wrong with the arguments by the schema's required names, known names and plain types, or None."""
    if not isinstance(arguments, dict):
        return f"the arguments must be a JSON object, got {type(arguments).__name__}"
    properties = tool.parameters.get("properties", {})
    missing = [n for n in tool.parameters.get("required", ()) if n not in arguments]
    if missing:
        return f"missing argument {missing[0]!r}"
    for name, value in arguments.items():
        if name not in properties:
            return f"unknown argument {name!r}; known: {', '.join(properties) or 'none'}"
        wanted = properties[name].get("type")
        allowed = _JSON_TYPES.get(wanted) if isinstance(wanted, str) else None
        if allowed and (not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)):
            return f"argument {name!r} must be of type {wanted}"
    return None
