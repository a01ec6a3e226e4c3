"""Messages and stream deltas in the shape of OpenAI's API, and back, with nothing lost.

Chat templates take a call's arguments as values, the API as JSON text. What was read keeps its text (`Arguments`), so
that both ways give what went in: spacing, the spelling of numbers, a key given twice, and text that is no JSON at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, NoReturn

from chat_tools.parsing.literals import dumps
from chat_tools.parsing.result import ArgumentsDelta, CallStarted, Event, TextDelta

Message = Mapping[str, Any]


class Arguments(dict[str, Any]):
    """The values of a call's arguments, with the JSON `text` from which they were read."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text

    def __reduce__(self) -> tuple[type[Arguments], tuple[dict[str, Any], str]]:
        """Keep the text in copies."""
        return Arguments, (dict(self), self.text)


def from_openai(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages of an API request as `render` and chat templates take them: arguments are values.

    Arguments that are no JSON object stay text. Everything else (ids, names, content parts, fields that are not known)
    is kept. ValueError for a message that is no mapping, or whose `tool_calls` is not a list of calls with functions.
    """
    return [_message(message, index, _values) for index, message in enumerate(messages)]


def to_openai(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in the API's shape: arguments are JSON text, every call has an id and every result names it.

    The inverse of `from_openai`: its results are restored as they were, unless the values were changed. A call
    without an id gets a free one (`call00000`, ...); a tool's message without `tool_call_id` answers the first call
    before it that none answers. An id may come again in a later turn: a result names the last such call before it.
    ValueError as `from_openai`, for a result without a call, an id that is no text, or values that JSON does not have;
    it names the message's index.
    """
    out = [_message(message, index, _text) for index, message in enumerate(messages)]
    _give_ids(out)
    waiting = _unanswered(out)
    for index, message in enumerate(out):
        if _is_result(message) and message.get("tool_call_id") is None:
            if not waiting or waiting[0][0] > index:
                raise ValueError(f"message {index} is a tool's result, and no call before it waits for one")
            message["tool_call_id"] = waiting.pop(0)[1]
    return out


def _give_ids(messages: Sequence[dict[str, Any]]) -> None:
    """Set an id for each call that has none."""
    taken = set()
    for index, message in enumerate(messages):
        for call in message.get("tool_calls") or ():
            if not isinstance(call.get("id"), str | None):
                raise ValueError(f"message {index} has a call whose id is no text: {call['id']!r}")
            taken.add(call.get("id"))
    free = (name for number in count() if (name := f"call{number:05d}") not in taken)
    for message in messages:
        for call in message.get("tool_calls") or ():
            if call.get("id") is None:
                call["id"] = next(free)


def _unanswered(messages: Sequence[Message]) -> list[tuple[int, str]]:
    """Return the calls that no result names, each with its message's index."""
    waiting: list[tuple[int, str]] = []
    for index, message in enumerate(messages):
        waiting += [(index, call["id"]) for call in message.get("tool_calls") or ()]
        named = message.get("tool_call_id") if _is_result(message) else None
        matches = [place for place, (_, name) in enumerate(waiting) if name == named]
        if matches:
            del waiting[matches[-1]]
    return waiting


def _is_result(message: Message) -> bool:
    return message.get("role") == "tool"


def delta_of(event: Event, first_call: int = 0) -> dict[str, Any] | None:
    """Return the `delta` of a streamed chunk that an event of `StreamParser` stands for; None where it is none.

    A call without an id of its own gets one from its number, `first_call` and those started before it in the turn.
    Malformed text or a dropped call is no delta: `TurnMessage` gives the deltas of a whole turn, with malformed text as
    content and the ids of `to_openai()`.
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
    if not isinstance(message, Mapping):
        raise ValueError(f"message {index} must be a mapping with a role, not {message!r:.80}")
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
            try:
                function["arguments"] = convert(function["arguments"])
            except (TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"message {index} has arguments that JSON does not have: {error}") from error
        yield {**call, "function": function}


def _is_call(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)


def _values(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        values = json.loads(arguments, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return arguments
    return Arguments(values, arguments) if isinstance(values, dict) else arguments


def _text(arguments: Any) -> Any:
    if isinstance(arguments, Arguments) and dumps(json.loads(arguments.text)) == dumps(dict(arguments)):
        return arguments.text
    if isinstance(arguments, str):
        return arguments
    return dumps(arguments)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else _refuse(digits)
