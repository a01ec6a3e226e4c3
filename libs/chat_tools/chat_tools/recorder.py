"""The tiles of a parse: what is taken always begins where the last tile ended, so nothing is lost or doubled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chat_tools.message import (
    CallFinished,
    Event,
    Kind,
    Malformed,
    MalformedFound,
    ParsedMessage,
    Retracted,
    Segment,
    TextDelta,
    ToolCall,
)


@dataclass(slots=True)
class _Tile:
    kind: Kind
    start: int
    end: int
    inner_start: int
    inner_end: int
    call: ToolCall | None = None
    reason: str = ""


class Recorder:
    """Collects tiles and, unless `silent`, events. Positions before `offset` are the prompt's and are not reported."""

    def __init__(self, offset: int, silent: bool = False) -> None:
        self.offset = offset
        self.silent = silent
        self.cursor = 0
        self.tiles: list[_Tile] = []
        self.events: list[Event] = []

    def text(self, kind: Kind, end: int, text: str) -> None:
        """Take the characters up to `end` as text of `kind`, reported as a delta."""
        if end == self.cursor:
            return
        if text and end > self.offset and not self.silent:
            visible = text[self.offset - self.cursor :] if self.cursor < self.offset else text
            self.events.append(TextDelta("reasoning" if kind == "reasoning" else "content", visible))
        last = self.tiles[-1] if self.tiles else None
        if last is not None and last.kind == kind and last.end == last.inner_end == self.cursor:
            last.end = last.inner_end = end
        else:
            self.tiles.append(_Tile(kind, self.cursor, end, self.cursor, end))
        self.cursor = end

    def marker(self, kind: Kind, end: int, opens: bool = False) -> None:
        """Take the characters up to `end` as a marker: part of a tile of `kind`, no part of its text."""
        last = self.tiles[-1] if self.tiles else None
        if not opens and kind == "reasoning" and last is not None and last.kind == kind:
            last.end = end
        else:
            self.tiles.append(_Tile(kind, self.cursor, end, end, end))
        self.cursor = end

    def call(self, end: int, name: str, arguments: str, notes: Sequence[str], identifier: str | None = None) -> None:
        """Take the characters up to `end` as a complete call."""
        span = (max(self.cursor - self.offset, 0), end - self.offset)
        call = ToolCall(name, arguments, span, identifier, tuple(notes))
        self.tiles.append(_Tile("call", self.cursor, end, self.cursor, end, call=call))
        self.cursor = end
        if end > self.offset and not self.silent:
            self.events.append(CallFinished(call))

    def malformed(self, end: int, reason: str) -> None:
        """Take the characters up to `end` as malformed."""
        if end == self.cursor:
            return
        self.tiles.append(_Tile("malformed", self.cursor, end, self.cursor, end, reason=reason))
        if end > self.offset and not self.silent:
            self.events.append(
                MalformedFound(Malformed((max(self.cursor - self.offset, 0), end - self.offset), reason))
            )
        self.cursor = end

    def extend(self, end: int) -> None:
        """Add the characters up to `end` (a closing wrapper) to the last tile."""
        self.tiles[-1].end = end
        self.cursor = end

    def note(self, note: str) -> None:
        """Add a diagnostic to the last call, if the last tile is one."""
        last = self.tiles[-1]
        if last.call is not None:
            last.call = replace(last.call, diagnostics=(*last.call.diagnostics, note))

    def retract(self, end: int, text_end: int, text: str) -> None:
        """Make all characters up to `end` one block of reasoning, whose text ends at `text_end`."""
        self.tiles = [_Tile("reasoning", 0, end, 0, text_end)]
        self.cursor = end
        if not self.silent:
            self.events.append(Retracted(text))

    def message(self, text: str, operations: int) -> ParsedMessage:
        """Put the result together; `text` is all of it, with what stands before the offset."""
        assert self.cursor == len(text), "every character is taken"
        offset = self.offset
        tiles = [tile for tile in self.tiles if tile.end > offset] if offset else self.tiles
        segments: list[Segment] = []
        calls: list[ToolCall] = []
        malformed: list[Malformed] = []
        for tile in tiles:
            start, end = max(tile.start - offset, 0), tile.end - offset
            inner_start, inner_end = max(tile.inner_start - offset, start), max(tile.inner_end - offset, start)
            segments.append(Segment(tile.kind, start, end, inner_start, inner_end))
            if tile.call is not None:
                calls.append(replace(tile.call, span=(start, end)))
            elif tile.kind == "malformed":
                malformed.append(Malformed((start, end), tile.reason))
        thoughts = (_inner(text, t, offset).strip() for t in tiles if t.kind == "reasoning")
        return ParsedMessage(
            text=text[offset:],
            content=_content(text, tiles, offset),
            reasoning="\n".join(thought for thought in thoughts if thought),
            tool_calls=tuple(calls),
            malformed=tuple(malformed),
            segments=tuple(segments),
            operations=operations,
        )


def _inner(text: str, tile: _Tile, offset: int) -> str:
    return text[max(tile.inner_start, offset) : max(tile.inner_end, offset)]


def _content(text: str, tiles: Sequence[_Tile], offset: int) -> str:
    """Join the text of the content tiles, trimmed at a side where a block stands."""
    parts = [t for t in tiles if t.kind == "content" and t.inner_end > t.inner_start]
    if not parts:
        return ""
    content = "".join(_inner(text, t, offset) for t in parts)
    if parts[0].start > offset:
        content = content.lstrip()
    if parts[-1].end < len(text):
        content = content.rstrip()
    return content
