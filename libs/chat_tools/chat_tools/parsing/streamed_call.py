"""What was said of the call that is coming, and how the rest is said once the parser has it.

What is said are the arguments as JSON text in the parser's own spelling: a value that is complete as a whole, a string
that the schema takes as it is while it comes. Joined it is the text of `ToolCall.arguments`; where the parser reads the
call in another way than it was told (a key given twice), it is dropped by an event and told again as a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from chat_tools.parsing.arguments import ToolSet, only_types
from chat_tools.parsing.literals import dumps
from chat_tools.parsing.result import ArgumentsDelta, CallDropped, CallFinished, CallStarted, Event, ToolCall


class StreamedCall:
    """One call after another: its name, the arguments that are complete, and the beginning of a string. `tell` takes
    the events; `number` counts the calls that were started."""

    def __init__(self, tools: ToolSet, tell: Callable[[Event], None]) -> None:
        self.tools, self.tell = tools, tell
        self.number = 0
        self.forget()

    def forget(self) -> None:
        """Forget the call without an event: none was reported, or it is finished, or all of it was held back."""
        self.name: str | None = None
        self.items: dict[str, Any] = {}
        self._key: str | None = None
        self._said: list[str] = []  # of the string under `_key`, decoded
        self._properties: Mapping[str, Any] = {}
        self._extra = False

    def start(self, name: str, identifier: str | None) -> None:
        """Emit the start of a call."""
        self.name = name
        schema = self.tools.get(name) or {}
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._extra = isinstance(schema.get("additionalProperties"), Mapping)
        self.tell(CallStarted(self.number, name, identifier))

    def is_declared(self, key: str) -> bool:
        """Return whether the tool's schema names this argument."""
        return key in self._properties

    def may_be_text(self, key: str) -> bool:
        """Return whether a string under this key stays as it is, so that its beginning is certain."""
        return "string" in self._types(key)

    def is_text(self, key: str) -> bool:
        """Return whether text without quotes stays as it is, whatever it spells."""
        return self._types(key) == {"string"}

    def _types(self, key: str) -> set[str]:
        """Return the types of this key, if its schema has nothing else; text if it has no schema."""
        if key in self._properties:
            return only_types(self._properties[key]) or set()
        return set() if self._extra else {"string"}

    def item(self, key: str, value: Any) -> None:
        """Emit an argument that is complete, with the value that the parser will have."""
        self._emit((", " if self.items else "{") + dumps(key) + ": " + dumps(value))
        self.items[key] = value

    def checked_item(self, key: str, value: Any) -> None:
        """Emit an argument that is complete, fitted to the tool's schema."""
        assert self.name is not None
        values = {key: value}
        self.tools.check(self.name, values, [])
        self.item(key, values[key])

    def begin_string(self, key: str) -> None:
        """Begin a string under this key, whose text comes by `string`."""
        self._key, self._said = key, []

    def string(self, text: str) -> None:
        """Emit more of the current string."""
        if not text:
            return
        if self._said:
            self._emit(dumps(text)[1:-1])
        else:
            self._emit((", " if self.items else "{") + dumps(self._key) + ": " + dumps(text)[:-1])
        self._said.append(text)

    def end_string(self) -> None:
        """Emit the end of the current string."""
        key, text = self._key, "".join(self._said)
        assert key is not None
        self._key, self._said = None, []
        if text:
            self._emit('"')
            self.items[key] = text
        else:
            self.item(key, "")

    def finish(self, call: ToolCall) -> None:
        """Emit the rest of a call that is complete, or all of it."""
        rest = self._rest(call) if self.name is not None else None
        if rest is None:
            self.drop("the call was read in another way")
            self.tell(CallStarted(self.number, call.name, call.id))
            rest = call.arguments
        if rest:
            self.tell(ArgumentsDelta(self.number, rest))
        self.tell(CallFinished(call, self.number))
        self.number += 1
        self.forget()

    def drop(self, reason: str) -> None:
        """Drop a call that was started and is none; no event where none was started."""
        if self.name is not None:
            self.tell(CallDropped(self.number, reason))
            self.number += 1
        self.forget()

    def _emit(self, text: str) -> None:
        self.tell(ArgumentsDelta(self.number, text))

    def _rest(self, call: ToolCall) -> str | None:
        """Return the rest of the arguments' text after the emitted part; None where that is no prefix of it."""
        said = self._text()
        if call.name != self.name or not call.arguments.startswith(said):
            return None
        known = list(call.arguments_dict().items())[: len(self.items)]
        return call.arguments[len(said) :] if known == list(self.items.items()) else None

    def _text(self) -> str:
        """Return the emitted text: the items, and the beginning of the string under `_key`."""
        text = dumps(self.items)[:-1] if self.items else ""
        if self._key is not None and self._said:
            text += (", " if self.items else "{") + dumps(self._key) + ": " + dumps("".join(self._said))[:-1]
        return text


LONGEST_TAG = 600


class ReaderStates:
    """States that read the text from a place on and emit what is certain of it.

    `state` takes what there is (never nothing) and returns how many characters it has read; 0 waits for more, or has
    changed the state. In the state `stop` nothing more is emitted before the parser has the call.
    """

    def __init__(self, stream_call: StreamedCall) -> None:
        self.stream_call = stream_call
        self.state: Callable[[str], int] = self.stop

    def stop(self, text: str) -> int:
        """Wait for the parser."""
        del text
        return 0

    def wait(self, text: str) -> int:
        """Wait for more of a text that is usually short; stop where it is long."""
        if len(text) > LONGEST_TAG:
            self.state = self.stop
        return 0
