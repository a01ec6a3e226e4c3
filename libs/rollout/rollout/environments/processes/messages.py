"""What crosses the border between a run and its environments' processes: plain data as JSON, pictures as bytes.

A call is {"id", "call": "open" | "step" | "finish" | "close", "episode", ...}, its result {"id", ...}, a failure
{"id", "failed": reason, "retryable"}. An environment asks for a turn of a sub-agent by {"ask": ..., "conversation"}. A
process sends {"beat": CPU seconds} every second. A factory is described by names and values, and rebuilt there
(`describe`, `rebuild`): classes and functions at the top of a module, their partials, instances by their attributes.
"""

import base64
import functools
import inspect
import io
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rollout.chat.messages import Message, Reply
from rollout.environments.environment import Observation, Score, StepResult
from rollout.tools.tool import Tool, ToolCall
from seqpack.extensions.load_object import IMPORTED, load_object

BYTES, PICTURE = "$bytes", "$picture"


def pack_messages(messages: Sequence[Message]) -> str:
    """Return messages as JSON. Raise TypeError for what is neither plain data, bytes, nor a picture."""
    return json.dumps([dict(message) for message in messages], default=_packed)


def unpack_messages(text: str) -> tuple[Message, ...]:
    """Return the messages that `pack_messages` was given."""
    return tuple(json.loads(text, object_hook=_unpacked))


def _packed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes):
        return {BYTES: base64.b64encode(value).decode()}
    if hasattr(value, "item") and not getattr(value, "shape", ()):
        return value.item()  # a number of numpy's
    if not (hasattr(value, "save") and hasattr(value, "getbands")):
        raise TypeError(
            f"a {type(value).__name__} in a message: give texts, numbers, lists, mappings, bytes or pictures"
        )
    file = io.BytesIO()
    value.save(file, "PNG")
    return {PICTURE: base64.b64encode(file.getvalue()).decode()}


def _unpacked(value: dict[str, Any]) -> Any:
    if value.keys() == {BYTES}:
        return base64.b64decode(value[BYTES])
    if value.keys() == {PICTURE}:
        from PIL import Image  # only images need it

        return Image.open(io.BytesIO(base64.b64decode(value[PICTURE])))
    return value


def describe(value: Any) -> Any:
    """Return a factory, or a task's data, as plain data that `rebuild` reads in another process.

    Raises:
        TypeError: it has a part without a name at the top of a module, or that is no plain value.
    """
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, bytes):
        return {BYTES: base64.b64encode(value).decode()}
    if isinstance(value, list | tuple):
        return {"$tuple" if isinstance(value, tuple) else "$list": [describe(part) for part in value]}
    if isinstance(value, Mapping):
        return {"$dict": [[describe(key), describe(part)] for key, part in value.items()]}
    if isinstance(value, functools.partial):
        return {"$partial": describe((value.func, value.args, value.keywords))}
    name = getattr(value, "__qualname__", None)
    if isinstance(value, type) or inspect.isroutine(value):
        if value.__module__ == "__main__" or getattr(sys.modules[value.__module__], str(name), None) is not value:
            raise TypeError(f"{name} is not at the top of a module other than the script that runs")
        return {"$object": [value.__module__, name, IMPORTED.get(value.__module__)]}
    if not hasattr(value, "__dict__"):
        raise TypeError(f"a {type(value).__name__} can't be sent to another process")
    return {"$instance": [describe(type(value)), describe(vars(value))]}


def rebuild(plain: Any) -> Any:
    """Return what `describe` was given, with copies of its instances."""
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    if kind == BYTES:
        return base64.b64decode(value)
    if kind == "$dict":
        return {rebuild(key): rebuild(part) for key, part in value}
    if kind == "$object":
        module, name, file = value
        return load_object(f"{file or module}:{name}", "environment")
    if kind == "$partial":
        function, arguments, keywords = rebuild(value)
        return functools.partial(function, *arguments, **keywords)
    if kind == "$instance":
        made = object.__new__(rebuild(value[0]))
        made.__dict__.update(rebuild(value[1]))
        return made
    parts = [rebuild(part) for part in value]
    return tuple(parts) if kind == "$tuple" else parts


def pack_result(value: Observation | StepResult | Score) -> dict[str, Any]:
    """Return a checked result of an environment's method as plain data."""
    if isinstance(value, Score):
        components = dict(value.reward_components)
        return {"reward": value.reward, "components": components, "turns": list(value.turn_rewards)}
    head: dict[str, Any] = {"messages": pack_messages(value.messages)}
    if isinstance(value, Observation):
        tools = [[t.name, t.description, dict(t.parameters), t.timeout, t.max_characters] for t in value.tools]
        return head | {"tools": tools}
    context = None if value.context is None else pack_messages(value.context)
    return head | {"done": value.done, "metrics": dict(value.metrics), "cut_off": value.cut_off, "context": context}


def unpack_observation(head: Mapping[str, Any]) -> Observation:
    """Return the observation; its tools are run by the environment, in its process."""
    return Observation(unpack_messages(head["messages"]), unpack_tools(head["tools"]))


def unpack_tools(tools: Sequence[Sequence[Any]]) -> tuple[Tool, ...]:
    """Return tools that another process runs."""
    return tuple(Tool(name, text, parameters, _elsewhere, *limits) for name, text, parameters, *limits in tools)


def unpack_step(head: Mapping[str, Any]) -> StepResult:
    """Return the result of a step."""
    context = None if head["context"] is None else unpack_messages(head["context"])
    return StepResult(unpack_messages(head["messages"]), head["done"], head["metrics"], context, head["cut_off"])


def pack_reply(reply: Reply) -> dict[str, Any]:
    """Return a turn of the policy as plain data."""
    return asdict(reply)


def unpack_reply(head: Mapping[str, Any]) -> Reply:
    """Return the turn."""
    calls = tuple(ToolCall(**call) for call in head["tool_calls"])
    return Reply(**{**head, "tool_calls": calls, "problems": tuple(head["problems"])})


def _elsewhere(**_: Any) -> None:
    raise RuntimeError("this tool runs in its environment's process, which step() calls")
