"""What a parse gives: segments that cover the text, the calls in it, and the events of a stream."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Kind = Literal["content", "reasoning", "call", "malformed"]


class Segment(NamedTuple):
    """One part of the text: characters `start:end`; what stands between its own markers is `inner_start:inner_end`."""

    kind: Kind
    start: int
    end: int
    inner_start: int
    inner_end: int


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call. `arguments` is the JSON text of an object; `span` is in characters of the parsed text."""

    name: str
    arguments: str
    span: tuple[int, int]
    id: str | None = None
    diagnostics: tuple[str, ...] = ()

    def arguments_dict(self) -> dict[str, Any]:
        """Return the arguments as Python values."""
        values: dict[str, Any] = json.loads(self.arguments)
        return values

    def to_message(self) -> dict[str, Any]:
        """Return the call as chat templates take it, an entry of `tool_calls`."""
        call: dict[str, Any] = {"type": "function", "function": {"name": self.name, "arguments": self.arguments_dict()}}
        if self.id is not None:
            call["id"] = self.id
        return call


class Malformed(NamedTuple):
    """Characters that began like a call (or a marker) and cannot be read as one, with the reason in words."""

    span: tuple[int, int]
    reason: str


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """One assistant turn taken apart.

    `segments` cover `text`: each character is in exactly one of them, in order. `content` and `reasoning` are the text
    of their segments without markers; white space that borders on a block is the format's, and trimmed.
    """

    text: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[Malformed, ...] = ()
    segments: tuple[Segment, ...] = ()
    operations: int = field(default=0, compare=False)

    def to_message(self) -> dict[str, Any]:
        """Return the turn as an assistant message for `render`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_message() for call in self.tool_calls]
        return message


class TextDelta(NamedTuple):
    """More text of `kind`, verbatim."""

    kind: Literal["content", "reasoning"]
    text: str


class CallFinished(NamedTuple):
    """A call is complete and may be executed. Its `span` can still grow by a closing wrapper."""

    call: ToolCall


class MalformedFound(NamedTuple):
    """Something was given up as malformed."""

    malformed: Malformed


class Retracted(NamedTuple):
    """All that was reported so far was reasoning: its opening marker stood in the prompt (give it as `prefill`)."""

    text: str


Event = TextDelta | CallFinished | MalformedFound | Retracted
