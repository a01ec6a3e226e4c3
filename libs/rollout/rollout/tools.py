"""Tools a model may call. Whatever goes wrong inside one comes back to the model as text; it never stops the run."""

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
class Tool:
    """A function offered to the model.

    `parameters` is the JSON schema of its arguments (an object). `run(**arguments)` is plain or async and returns text,
    or anything that json can write. A plain one runs in a thread: past `timeout` seconds its answer is no longer
    awaited (the thread itself cannot be killed). Answers are cut at `max_characters`.
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
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        object.__setattr__(self, "schema", {"type": "function", "function": function})


@dataclass(frozen=True)
class ToolResult:
    """What the model is told, and whether the call worked."""

    name: str
    content: str
    ok: bool


async def call_tool(tools: Sequence[Tool], name: str, arguments: str) -> ToolResult:
    """Run the named tool on arguments given as JSON text. Never raises on what the model or the tool did wrong."""
    tool = next((t for t in tools if t.name == name), None)
    if tool is None:
        known = ", ".join(t.name for t in tools) or "none"
        return ToolResult(name, f"Error: there is no tool {name!r}; available: {known}", ok=False)
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        return ToolResult(name, f"Error: the arguments are not valid JSON: {error}", ok=False)
    problem = _argument_problem(tool, given)
    if problem:
        return ToolResult(name, f"Error: {problem}", ok=False)
    try:
        ok, text = await asyncio.wait_for(_run(tool, given), tool.timeout)
    except TimeoutError:
        ok, text = False, f"Error: {name} gave no answer within {tool.timeout:g} s"
    if len(text) > tool.max_characters:
        text = text[: tool.max_characters] + f" [cut after {tool.max_characters} characters]"
    return ToolResult(name, text, ok)


async def _run(tool: Tool, arguments: dict[str, Any]) -> tuple[bool, str]:
    """Whether the call worked, and what to say of it."""
    if not inspect.iscoroutinefunction(tool.run):
        return await asyncio.to_thread(_attempt, tool.run, arguments)
    try:
        return True, _as_text(await tool.run(**arguments))
    except (Exception, SystemExit) as error:  # noqa: BLE001  somebody else's code: its failure is the model's news
        return False, _as_error(error)


def _attempt(run: Callable[..., Any], arguments: dict[str, Any]) -> tuple[bool, str]:
    try:
        return True, _as_text(run(**arguments))
    except (Exception, SystemExit) as error:  # noqa: BLE001  the same
        return False, _as_error(error)


def _as_text(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _as_error(error: BaseException) -> str:
    return f"Error: {type(error).__name__}: {error}"


def _argument_problem(tool: Tool, given: Any) -> str | None:
    """What is wrong with the arguments by the schema's required names, known names and plain types; None if nothing."""
    if not isinstance(given, dict):
        return f"the arguments must be a JSON object, got {type(given).__name__}"
    properties = tool.parameters.get("properties", {})
    missing = [n for n in tool.parameters.get("required", ()) if n not in given]
    if missing:
        return f"missing argument {missing[0]!r}"
    for name, value in given.items():
        if name not in properties:
            return f"unknown argument {name!r}; known: {', '.join(properties) or 'none'}"
        wanted = properties[name].get("type")
        allowed = _JSON_TYPES.get(wanted) if isinstance(wanted, str) else None
        if allowed and (not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed)):
            return f"argument {name!r} must be of type {wanted}"
    return None
