"""Messages and stream deltas in the shape of OpenAI's API, and back, with nothing lost.

Chat templates take a call's arguments as values, the API as JSON text. What was read keeps its text (`Arguments`), so
that both ways give what went in: spacing, the spelling of numbers, a key given twice, and text that is no JSON at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from chat_tools.parsing.literals import dumps
from chat_tools.parsing.result import ArgumentsDelta, CallStarted, Event, TextDelta

Message = Mapping[str, Any]


class Arguments(dict[str, Any]):
    """The values of a call's arguments, which remember the JSON `text` that they were read from."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text

    def __reduce__(self) -> tuple[type[Arguments], tuple[dict[str, Any], str]]:
        """Keep the text in copies."""
        return Arguments, (dict(self), self.text)


def from_openai(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages of an API request as `render` and chat templates take them: arguments are values.

    Arguments that are no JSON object stay text. Everything else (ids, names, content parts, fields that are not known)
    is kept. ValueError where `tool_calls` is not a list of calls with functions.
    """
    return [_message(message, index, _values) for index, message in enumerate(messages)]


def to_openai(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the API's shape: arguments are JSON text, every call has an id and every result names it.

    The inverse of `from_openai`: what came from there goes back as it was, unless the values were changed. A call
    without an id gets a free one (`call00000`, ...); a tool's message without `tool_call_id` answers the first call
    before it that none answers. ValueError as `from_openai`, for a result without a call, or for values that JSON does
    not have.
    """
    taken = {call.get("id") for message in messages for call in message.get("tool_calls") or () if _is_call(call)}
    free = (name for number in count() if (name := f"call{number:05d}") not in taken)
    answered = {message.get("tool_call_id") for message in messages}
    waiting: list[str] = []
    out = []
    for index, message in enumerate(messages):
        sent = _message(message, index, _text)
        for call in sent.get("tool_calls") or ():
            if call.get("id") is None:
                call["id"] = next(free)
            if call["id"] not in answered:
                waiting.append(call["id"])
        if message.get("role") == "tool" and message.get("tool_call_id") is None:
            if not waiting:
                raise ValueError(f"message {index} is a tool's result, and no call before it waits for one")
            sent["tool_call_id"] = waiting.pop(0)
        out.append(sent)
    return out


def delta_of(event: Event, first_call: int = 0) -> dict[str, Any] | None:
    """Return the `delta` of a streamed chunk that an event of `StreamParser` stands for; None where it is none.

    A call without an id of its own gets one from its number, `first_call` and those before it in the turn.
    """
    if isinstance(event, TextDelta):
        return {"content" if event.kind == "content" else "reasoning_content": event.text}
    if isinstance(event, CallStarted):
        identifier = event.id or f"call{first_call + event.number:05d}"
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.number, "id": identifier, "type": "function", "function": function}]}
    if isinstance(event, ArgumentsDelta):
        return {"tool_calls": [{"index": event.number, "function": {"arguments": event.text}}]}
    return None


def _message(message: Message, index: int, convert: Any) -> dict[str, Any]:
    sent = dict(message)
    if sent.get("tool_calls") is not None:
        sent["tool_calls"] = list(_calls(sent["tool_calls"], index, convert))
    return sent


def _calls(calls: Any, index: int, convert: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str) or not all(map(_is_call, calls)):
        raise ValueError(f'tool_calls of message {index} must be a list of {{"function": {{"name": ...}}}}')
    for call in calls:
        function = dict(call["function"])
        if "arguments" in function:
            function["arguments"] = convert(function["arguments"])
        yield {**call, "function": function}


def _is_call(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)


def _values(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        values = json.loads(arguments, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return arguments
    return Arguments(values, arguments) if isinstance(values, dict) else arguments


def _text(arguments: Any) -> Any:
    if isinstance(arguments, Arguments) and dumps(json.loads(arguments.text)) == dumps(dict(arguments)):
        return arguments.text
    if isinstance(arguments, str):
        return arguments
    return dumps(arguments)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
