"""The results of a parse: segments that cover the text, the calls in it, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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

    def to_message(self, number: int = 0) -> dict[str, Any]:
        """Return the call for chat templates, as an entry of `tool_calls`: arguments are values.

        Without an id of its own it gets one from its number, nine letters and digits as Mistral's templates ask for.
        """
        function = {"name": self.name, "arguments": self.arguments_dict()}
        return {"type": "function", "id": self.id or f"call{number:05d}", "function": function}

    def to_openai(self, number: int = 0) -> dict[str, Any]:
        """Return the call in the shape of OpenAI's API: like `to_message`, but arguments are JSON text."""
        return {**self.to_message(number), "function": {"name": self.name, "arguments": self.arguments}}


class Malformed(NamedTuple):
    """Characters that began like a call (or a marker) and cannot be read as one, with the reason in words."""

    span: tuple[int, int]
    reason: str


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """One parsed assistant turn.

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

    def to_message(self, first_call: int = 0) -> dict[str, Any]:
        """Return the turn as an assistant message for `render`, with arguments as values.

        Malformed text stays in the content as the model wrote it, so that the next turn sees it. Calls without an id
        are numbered from `first_call` on: pass the number of earlier calls, and ids differ between turns.
        """
        calls = [call.to_message(first_call + i) for i, call in enumerate(self.tool_calls)]
        return self._message(calls)

    def to_openai(self, first_call: int = 0) -> dict[str, Any]:
        """Return the turn in the shape of OpenAI's API: like `to_message`, but arguments are JSON text."""
        calls = [call.to_openai(first_call + i) for i, call in enumerate(self.tool_calls)]
        return self._message(calls)

    def _message(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        content = joined_text(self.text, self.segments, ("content", "malformed")) if self.malformed else self.content
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if calls:
            message["tool_calls"] = calls
        return message


def joined_text(text: str, segments: Sequence[Segment], kinds: Sequence[Kind]) -> str:
    """Join the text of the segments of some kinds, trimmed at a side that borders on a segment of another kind."""
    parts = [s for s in segments if s.kind in kinds and s.inner_end > s.inner_start]
    if not parts:
        return ""
    pieces = [text[s.inner_start : s.inner_end] for s in parts]
    joined = "".join(pieces)
    # White space alone before or after a segment of a kind that is left out borders on it too.
    apart = [before.end < after.start for before, after in pairwise(parts)]
    if parts[0].start > 0 or (pieces[0].isspace() and apart[:1] == [True]):
        joined = joined.lstrip()
    if parts[-1].inner_end < len(text) or (pieces[-1].isspace() and apart[-1:] == [True]):
        joined = joined.rstrip()
    return joined


class TextDelta(NamedTuple):
    """More text of `kind`, verbatim."""

    kind: Literal["content", "reasoning"]
    text: str


class CallStarted(NamedTuple):
    """The start of a call: its number among the started calls, its tool's name, and its id if it has one."""

    number: int
    name: str
    id: str | None = None


class ArgumentsDelta(NamedTuple):
    """More of the JSON text of a call's arguments; all of them joined are `ToolCall.arguments`."""

    number: int
    text: str


class CallFinished(NamedTuple):
    """The end of a call, which is complete and may be executed. Its `span` can still grow by a closing wrapper."""

    call: ToolCall
    number: int = 0


class CallDropped(NamedTuple):
    """The end of a started call that is none, or is reported again as a new one: its earlier events do not count."""

    number: int
    reason: str


class MalformedFound(NamedTuple):
    """Text that was found to be malformed."""

    malformed: Malformed


class Retracted(NamedTuple):
    """A retraction: all text so far was reasoning, whose opening marker is in the prompt (pass it as `prefill`)."""

    text: str


Event = TextDelta | CallStarted | ArgumentsDelta | CallFinished | CallDropped | MalformedFound | Retracted
