"""The segments of a parse: what is taken always begins where the last segment ended, so nothing is lost or doubled."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from chat_tools.parsing.preview import Preview
from chat_tools.parsing.result import (
    Event,
    Kind,
    Malformed,
    MalformedFound,
    ParsedMessage,
    Retracted,
    Segment,
    TextDelta,
    ToolCall,
    joined_text,
)


class _Call(NamedTuple):
    """A call before its span is known: a closing wrapper may still be added."""

    name: str
    arguments: str
    id: str | None
    notes: tuple[str, ...]


class Recorder:
    """A recorder of segments and, unless `silent`, events. Positions before `offset` are the prompt's, not reported.

    While `holding`, calls are kept back: it is not known yet whether they are reasoning.

    The segments are columns, since a text can have very many: kind, end, the span of the inner text; and what a call or
    a malformed segment is besides. A segment begins where the one before it ends.
    """

    __slots__ = (
        "_details", "_ends", "_held", "_inner_ends", "_inner_starts", "_kinds",
        "cursor", "events", "holding", "offset", "preview", "silent",
    )  # fmt: skip

    def __init__(self, offset: int, silent: bool = False) -> None:
        self.offset = offset
        self.silent = silent
        self.preview: Preview | None = None  # who tells of calls; none where nothing is reported
        self.cursor = 0
        self.events: list[Event] = []
        self.holding = False
        self._held: list[Event] = []
        self._kinds: list[Kind] = []
        self._ends: list[int] = []
        self._inner_starts: list[int] = []
        self._inner_ends: list[int] = []
        self._details: dict[int, _Call | str] = {}

    def tell(self, event: Event) -> None:
        """Report an event of a call, now or once it is known to be no reasoning."""
        (self._held if self.holding else self.events).append(event)

    def _drop(self, reason: str) -> None:
        """Report that the earlier events of a call do not count."""
        if self.preview is not None and self.preview.started:
            self.preview.drop(reason)

    def _add(self, kind: Kind, end: int, inner_start: int) -> None:
        self._kinds.append(kind)
        self._ends.append(end)
        self._inner_starts.append(inner_start)
        self._inner_ends.append(end)
        self.cursor = end

    def text(self, kind: Kind, end: int, text: str) -> None:
        """Record the characters up to `end` as text of `kind`, and report them as a delta."""
        cursor = self.cursor
        if end == cursor:
            return
        self._drop("no call after all")
        if text and end > self.offset and not self.silent:
            visible = text[self.offset - cursor :] if cursor < self.offset else text
            self.events.append(TextDelta("reasoning" if kind == "reasoning" else "content", visible))
        if self._kinds and self._kinds[-1] == kind and self._inner_ends[-1] == cursor:
            self._ends[-1] = self._inner_ends[-1] = self.cursor = end
        else:
            self._add(kind, end, cursor)

    def opens(self, kind: Kind, end: int) -> None:
        """Record the characters up to `end` as the marker that begins a segment of `kind`."""
        self._drop("no call after all")
        self._add(kind, end, end)

    def closes(self, kind: Kind, end: int) -> None:
        """Record the characters up to `end` as a marker that closes text of `kind`, if there is some."""
        if self._kinds and self._kinds[-1] == kind:
            self._ends[-1] = self.cursor = end
        else:
            self._add(kind, end, end)

    def call(self, end: int, name: str, arguments: str, notes: Sequence[str], identifier: str | None = None) -> None:
        """Record the characters up to `end` as a complete call."""
        call = self._details[len(self._kinds)] = _Call(name, arguments, identifier, tuple(notes))
        if end > self.offset and self.preview is not None:
            span = (max(self.cursor - self.offset, 0), end - self.offset)
            self.preview.finish(ToolCall(name, arguments, span, identifier, call.notes))
        self._add("call", end, self.cursor)

    def release(self) -> None:
        """Report the calls that were held back, and hold back no more, as they are no reasoning."""
        self.events += self._held
        self._held = []
        self.holding = False

    def malformed(self, end: int, reason: str) -> None:
        """Record the characters up to `end` as malformed."""
        if end == self.cursor:
            return
        self._drop(reason)
        if end > self.offset and not self.silent:
            span = (max(self.cursor - self.offset, 0), end - self.offset)
            self.events.append(MalformedFound(Malformed(span, reason)))
        self._details[len(self._kinds)] = reason
        self._add("malformed", end, self.cursor)

    def extend(self, end: int) -> None:
        """Add the characters up to `end` (a closing wrapper) to the last segment."""
        self._ends[-1] = self.cursor = end

    def note(self, note: str) -> None:
        """Add a diagnostic to the last call, if the last segment is one."""
        last = len(self._kinds) - 1
        call = self._details.get(last)
        if isinstance(call, _Call):
            self._details[last] = call._replace(notes=(*call.notes, note))

    def retract(self, end: int, text_end: int, text: str) -> None:
        """Turn all characters up to `end` into one block of reasoning, whose text ends at `text_end`."""
        self._kinds, self._ends, self._inner_starts, self._inner_ends = ["reasoning"], [end], [0], [text_end]
        self._details.clear()
        self._held = []
        self.holding = False
        self.cursor = end
        if self.preview is not None:
            self.preview.forget()
        if not self.silent:
            self.events.append(Retracted(text))

    def segments(self, first: int) -> list[Segment]:
        """Return the segments from the one of this index on; the last one may still grow."""
        places = [0, *self._ends][first : len(self._ends)]
        columns = (places, self._ends[first:], self._inner_starts[first:], self._inner_ends[first:])
        rows = zip(self._kinds[first:], *map(self._shifted, columns), strict=True)
        return [Segment(*row) for row in rows]

    def message(self, text: str, operations: int) -> ParsedMessage:
        """Return the result; `text` is the whole text, with the part before the offset."""
        assert self.cursor == len(text), "every character is taken"
        kinds, ends = self._kinds, self._ends
        inner_starts, inner_ends = self._inner_starts, self._inner_ends
        starts = [0, *ends[:-1]] if ends else []
        if self.offset:
            text, starts, ends = text[self.offset :], self._shifted(starts), self._shifted(ends)
            inner_starts, inner_ends = self._shifted(inner_starts), self._shifted(inner_ends)
            hidden = sum(end <= 0 for end in ends)  # segments that are all the prompt's
        else:
            hidden = 0
        rows = zip(kinds, starts, ends, inner_starts, inner_ends, strict=True)
        segments = tuple(map(partial(tuple.__new__, Segment), rows))
        calls: list[ToolCall] = []
        malformed: list[Malformed] = []
        for index, detail in self._details.items():
            if index < hidden:
                continue
            span = (starts[index], ends[index])
            if isinstance(detail, str):
                malformed.append(Malformed(span, detail))
            else:
                calls.append(ToolCall(detail.name, detail.arguments, span, detail.id, detail.notes))
        segments = segments[hidden:]
        thoughts = [text[s.inner_start : s.inner_end].strip() for s in segments if s.kind == "reasoning"]
        return ParsedMessage(
            text=text,
            content=joined_text(text, segments, ("content",)),
            reasoning="\n".join(filter(None, thoughts)),
            tool_calls=tuple(calls),
            malformed=tuple(malformed),
            segments=segments,
            operations=operations,
        )

    def _shifted(self, positions: Sequence[int]) -> list[int]:
        offset = self.offset
        return [position - offset if position > offset else 0 for position in positions]
