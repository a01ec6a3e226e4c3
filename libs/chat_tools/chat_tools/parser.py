"""The engine: `parse` is the fold of `StreamParser.feed`, so a stream gives what the whole text gives."""

from __future__ import annotations

import codecs
import re
from collections.abc import Generator, Sequence
from typing import Any

from chat_tools.arguments import ToolSet
from chat_tools.grammar import Format, find_format
from chat_tools.message import Event, Kind, ParsedMessage
from chat_tools.reader import Marks, Reader, Wait
from chat_tools.recorder import Recorder
from chat_tools.tagged import TaggedReader, TaggedTables


class Tables:
    """The markers of a format, compiled; one per format and process."""

    def __init__(self, fmt: Format) -> None:
        self.fmt = fmt
        self.think = dict(fmt.reasoning)
        self.think_close = {closing for _, closing in fmt.reasoning}
        marks = [*self.think, *self.think_close, *(fmt.section or ()), *fmt.call, *fmt.ends]
        self.top = Marks.of(marks)
        self.think_ends = {closing: Marks.of([closing]) for closing in self.think_close}
        self.resync = Marks.of([*(fmt.section or ()), *fmt.call, *fmt.ends])
        self.tagged = TaggedTables(fmt)


_TABLES: dict[Format, Tables] = {}


def _tables(fmt: Format) -> Tables:
    if fmt not in _TABLES:
        _TABLES[fmt] = Tables(fmt)
    return _TABLES[fmt]


class StreamParser:
    """Takes a model's output in pieces of any size.

    `prefill` is what the prompt already holds of this turn (Qwen3.5's ends in "<think>\\n"): read first, not reported.
    Without it (None), a closing marker of reasoning that nobody opened makes all before it reasoning, calls too, and
    the stream says so by `Retracted`. `tools` (dicts or typed functions) give the arguments their types.
    """

    def __init__(
        self,
        format: str | Format,  # noqa: A002 - the public name
        tools: Sequence[Any] | None = None,
        *,
        prefill: str | None = None,
    ) -> None:
        self.tables = _tables(find_format(format))
        self._reader = Reader()
        self._recorder = Recorder(len(prefill or ""))
        self._tools = ToolSet(tools)
        self._prefill_known = prefill is not None
        self._thought = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tagged = TaggedReader(self._reader, self._recorder, self.tables.tagged, self._tools)
        self._run: Generator[None, None, None] | None = self._turn()
        self._message: ParsedMessage | None = None
        self._append(prefill or "")

    def feed(self, text: str | bytes) -> list[Event]:
        """Take more text and return what it settled. Bytes are UTF-8, and may be cut within a character."""
        if self._message is not None:
            raise ValueError("this parser is finished: make a new StreamParser for the next turn")
        if isinstance(text, bytes):
            text = self._decoder.decode(text)
        else:
            text = self._decoder.decode(b"", True) + text
            self._decoder.reset()
        self._append(text)
        events, self._recorder.events = self._recorder.events, []
        return events

    def finish(self) -> ParsedMessage:
        """End the text and return the whole message. Further calls return the same."""
        if self._message is None:
            rest = self._decoder.decode(b"", True)
            self._reader.final = True
            self._append(rest)
            self._message = self._recorder.message(self._reader.text(), self._reader.operations)
        return self._message

    def _append(self, text: str) -> None:
        self._reader.append(text)
        if self._run is not None and next(self._run, self) is self:
            self._run = None

    def _turn(self) -> Generator[None, None, None]:
        """Read a turn: text, blocks of reasoning, calls."""
        fmt, reader, recorder, tables = self.tables.fmt, self._reader, self._recorder, self.tables
        while True:
            match = yield from self._text("content", tables.top)
            if match is None:
                return
            mark = match.group()
            start = reader.pos
            reader.pos += len(mark)
            if mark in tables.think:
                self._thought = True
                recorder.marker("reasoning", reader.pos, opens=True)
                yield from self._reasoning(tables.think[mark])
            elif mark in tables.think_close:
                self._stray_think_close(start)
            elif fmt.section and mark == fmt.section[0]:
                yield from self._section()
            elif mark == fmt.call[0]:
                if fmt.section and not (fmt.bare and reader.at_line_start(start)):
                    recorder.text("content", reader.pos, mark)
                else:
                    yield from self._call()
            elif mark in fmt.ends:
                recorder.marker("content", reader.pos)
            else:
                recorder.malformed(reader.pos, f"{mark} closes nothing")

    def _text(self, kind: Kind, marks: Marks) -> Wait[re.Match[str] | None]:
        """Take text of a kind up to the next marker, as it comes."""
        search = self._reader.search(marks)
        while True:
            try:
                next(search)
            except StopIteration as stop:
                self._take(kind)
                match: re.Match[str] | None = stop.value
                return match
            self._take(kind)
            yield

    def _take(self, kind: Kind) -> None:
        start, end = self._recorder.cursor, self._reader.pos
        self._recorder.text(kind, end, self._reader.slice(start, end))

    def _reasoning(self, close: str) -> Wait[None]:
        if (yield from self._text("reasoning", self.tables.think_ends[close])) is not None:
            self._reader.pos += len(close)
            self._recorder.marker("reasoning", self._reader.pos)

    def _stray_think_close(self, start: int) -> None:
        reader, recorder = self._reader, self._recorder
        if self._prefill_known or self._thought:
            recorder.malformed(reader.pos, "the end of a reasoning block that was not opened")
        else:
            self._thought = True
            recorder.retract(reader.pos, start, reader.slice(0, start))

    def _section(self) -> Wait[None]:
        """Read a wrapper and the calls in it; it ends at its closing marker, or where text begins after a call."""
        reader, recorder, fmt = self._reader, self._recorder, self.tables.fmt
        assert fmt.section is not None
        found = 0
        while True:
            yield from reader.space()
            mark = yield from reader.at([fmt.call[0], fmt.section[1]])
            if mark == fmt.call[0]:
                reader.pos += len(mark)
                yield from self._call()
                found += 1
            elif mark == fmt.section[1] and found:
                reader.pos += len(mark)
                recorder.extend(reader.pos)
                return
            elif found:
                recorder.note("the closing marker is missing")
                return
            else:
                yield from self._give_up("no call inside the block")
                return

    def _call(self) -> Wait[None]:
        reason = yield from self._tagged.read()
        if reason is not None:
            yield from self._give_up(reason)

    def _give_up(self, reason: str) -> Wait[None]:
        """Take as malformed up to where something else can begin."""
        reader, fmt, tables = self._reader, self.tables.fmt, self.tables
        while True:
            match = yield from reader.search(tables.resync)
            if match is None:
                break
            mark = match.group()
            if mark in fmt.ends or (fmt.section and mark == fmt.section[0]):
                break
            if mark == fmt.call[0]:
                if reader.at_line_start(reader.pos) or not fmt.section:
                    break
                reader.pos += len(mark)
                continue
            reader.pos += len(mark)
            if fmt.section and mark == fmt.call[1]:
                yield from reader.space()
                if (yield from reader.at([fmt.section[1]])):
                    reader.pos += len(fmt.section[1])
            break
        self._recorder.malformed(reader.pos, reason)


def parse(
    text: str | bytes,
    format: str | Format,  # noqa: A002 - the public name
    tools: Sequence[Any] | None = None,
    *,
    prefill: str | None = None,
) -> ParsedMessage:
    """Take one assistant turn apart. Never raises on what a model wrote, evaluates nothing, loses no character."""
    parser = StreamParser(format, tools, prefill=prefill)
    parser.feed(text)
    return parser.finish()
