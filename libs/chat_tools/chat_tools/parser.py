"""The engine: `parse` is the fold of `StreamParser.feed`, so a stream gives what the whole text gives."""

from __future__ import annotations

import codecs
import re
from collections.abc import Generator, Sequence
from typing import Any

from chat_tools.arguments import ToolSet
from chat_tools.bracketed import NOT_A_CALL, BracketReader, BracketTables
from chat_tools.channels import ChannelReader, ChannelTables
from chat_tools.grammar import Channels, Format, Tagged, find_format
from chat_tools.message import Event, Kind, ParsedMessage
from chat_tools.reader import Marks, Reader, Wait
from chat_tools.recorder import Recorder
from chat_tools.tagged import TaggedReader, TaggedTables


class Tables:
    """The markers of a format, compiled; one per format and process."""

    def __init__(self, fmt: Format) -> None:
        self.fmt = fmt
        self.think = dict(fmt.reasoning)
        self.think_end = {closing: Marks.of([closing]) for closing in self.think.values()}
        self.calls = dict(fmt.calls)
        self.call_opens = list(self.calls)
        self.call_closes = [closing for closing in self.calls.values() if closing]
        section = [*(fmt.section or ())]
        stops = [*section, *self.call_opens, *self.call_closes, *fmt.ends]
        body = fmt.body
        channels = [body.start, body.channel, *body.ends] if isinstance(body, Channels) else []
        self.top = Marks.of([*self.think, *self.think_end, *stops, *channels])
        self.resync = Marks.of(stops) if stops else self.top
        self.body: TaggedTables | BracketTables | ChannelTables
        if isinstance(body, Tagged):
            self.body = TaggedTables(fmt)
        elif isinstance(body, Channels):
            self.body = ChannelTables(body)
        else:
            self.body = BracketTables(fmt, stops)


_TABLES: dict[Format, Tables] = {}


def _tables(fmt: Format) -> Tables:
    if fmt not in _TABLES:
        _TABLES[fmt] = Tables(fmt)
    return _TABLES[fmt]


class StreamParser:
    """Takes a model's output in pieces of any size.

    `prefill` is what the prompt already holds of this turn (Qwen3.5's ends in "<think>\\n"): read first, not reported.
    Without it (None), a closing marker of reasoning that nobody opened makes all before it reasoning, calls too, and
    the stream says so by `Retracted`. `tools` (dicts or typed functions) give the arguments their types. A `silent`
    parser reports no events, which is a little faster.
    """

    def __init__(
        self,
        format: str | Format,  # noqa: A002 - the public name
        tools: Sequence[Any] | None = None,
        *,
        prefill: str | None = None,
        silent: bool = False,
    ) -> None:
        tables = self.tables = _tables(find_format(format))
        begun = _begun(tables, prefill or "")
        self._reader = Reader()
        self._recorder = Recorder(len(begun), silent)
        tool_set = ToolSet(tools)
        self._body: TaggedReader | BracketReader | ChannelReader
        if isinstance(tables.body, TaggedTables):
            self._body = TaggedReader(self._reader, self._recorder, tables.body, tool_set)
        elif isinstance(tables.body, BracketTables):
            self._body = BracketReader(self._reader, self._recorder, tables.body, tool_set)
        else:
            self._body = ChannelReader(self._reader, self._recorder, tables.body, tool_set)
        self._thought = prefill is not None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._run: Generator[None, None, None] | None = self._turn()
        self._message: ParsedMessage | None = None
        self._append(begun)

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
        return self._events()

    def finish(self) -> ParsedMessage:
        """End the text and return the whole message. Further calls return the same."""
        if self._message is None:
            rest = self._decoder.decode(b"", True)
            self._reader.final = True
            self._append(rest)
            self._message = self._recorder.message(self._reader.text(), self._reader.operations)
        return self._message

    def last_events(self) -> list[Event]:
        """Return what the end of the text settled; to be asked after `finish`."""
        return self._events()

    def _events(self) -> list[Event]:
        events, self._recorder.events = self._recorder.events, []
        return events

    def _append(self, text: str) -> None:
        self._reader.append(text)
        if self._run is not None and next(self._run, self) is self:
            self._run = None

    def _turn(self) -> Generator[None, None, None]:
        """Read a turn: text, blocks of reasoning, calls."""
        reader, recorder, tables = self._reader, self._recorder, self.tables
        yield from self._opening()
        while True:
            match = yield from self._text("content", tables.top)
            if match is None:
                return
            mark, start = match.group(), reader.pos
            if isinstance(self._body, ChannelReader) and mark in self._body.tables.opens:
                yield from self._body.read()
                continue
            reader.pos += len(mark)
            if mark in tables.think:
                self._thought = True
                recorder.marker("reasoning", reader.pos, opens=True)
                yield from self._reasoning(tables.think[mark])
                yield from self._opening()
            elif mark in tables.think_end:
                self._stray_think_end(start)
                yield from self._opening()
            else:
                yield from self._marker(mark, start)

    def _marker(self, mark: str, start: int) -> Wait[None]:
        """Go on after a marker of calls or of the turn's end."""
        fmt, recorder, reader = self.tables.fmt, self._recorder, self._reader
        if fmt.section and mark == fmt.section[0]:
            yield from self._section()
        elif mark in self.tables.calls:
            if fmt.section and not (fmt.bare and reader.at_line_start(start)):
                recorder.text("content", reader.pos, mark)
            else:
                yield from self._call(mark)
        elif mark in fmt.ends or isinstance(fmt.body, Channels):
            recorder.marker("content", reader.pos)
        else:
            recorder.malformed(reader.pos, f"{mark} closes nothing")

    def _text(self, kind: Kind, marks: Marks) -> Wait[re.Match[str] | None]:
        """Take text of a kind up to the next marker, as it comes."""
        reader = self._reader
        while True:
            match = reader.step(marks)
            if reader.pos != self._recorder.cursor:
                self._take(kind)
            if match is not None or reader.final:
                return match
            yield

    def _take(self, kind: Kind) -> None:
        start, end = self._recorder.cursor, self._reader.pos
        self._recorder.text(kind, end, "" if self._recorder.silent else self._reader.slice(start, end))

    def _reasoning(self, close: str) -> Wait[None]:
        if (yield from self._text("reasoning", self.tables.think_end[close])) is not None:
            self._reader.pos += len(close)
            self._recorder.marker("reasoning", self._reader.pos)

    def _stray_think_end(self, start: int) -> None:
        reader, recorder = self._reader, self._recorder
        if self._thought:
            recorder.malformed(reader.pos, "the end of a reasoning block that was not opened")
        else:
            self._thought = True
            recorder.retract(reader.pos, start, reader.slice(0, start))

    def _opening(self) -> Wait[None]:
        """Read calls that need no marker, where an answer begins with them."""
        opening, reader = self.tables.fmt.opening, self._reader
        while opening:
            start = reader.pos
            yield from reader.space()
            yield from reader.at([";"])
            if (yield from reader.need(1)) != opening or not isinstance(self._body, BracketReader):
                reader.rewind(start)
                return
            reason = yield from self._body.read("", bare=True)
            if reason == NOT_A_CALL:
                reader.rewind(start)
                return
            if reason is not None:
                yield from self._give_up(reason)
                return
            after = reader.pos
            yield from reader.space()
            if (yield from reader.at([";"])) == ";":
                reader.pos += 1
            else:
                reader.rewind(after)

    def _section(self) -> Wait[None]:
        """Read a wrapper and the calls in it; it ends at its closing marker, or where text begins after a call."""
        reader, recorder, fmt = self._reader, self._recorder, self.tables.fmt
        assert fmt.section is not None
        found = 0
        while True:
            yield from reader.space()
            mark = yield from reader.at([*self.tables.call_opens, fmt.section[1]])
            if mark in self.tables.calls:
                reader.pos += len(mark)
                yield from self._call(mark)
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

    def _call(self, opened: str) -> Wait[None]:
        if isinstance(self._body, TaggedReader):
            reason = yield from self._body.read()
        else:
            assert isinstance(self._body, BracketReader)
            reason = yield from self._body.read(self.tables.calls[opened])
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
            if mark in tables.calls:
                if reader.at_line_start(reader.pos) or not fmt.section or not fmt.bare:
                    break
                reader.pos += len(mark)
                continue
            reader.pos += len(mark)
            if fmt.section and mark in tables.call_closes:
                yield from reader.space()
                if (yield from reader.at([fmt.section[1]])):
                    reader.pos += len(fmt.section[1])
            break
        self._recorder.malformed(reader.pos, reason)


def _begun(tables: Tables, prefill: str) -> str:
    """Return the part of the prompt's text in which something was begun that the answer goes on with."""
    body = tables.fmt.body
    opens = [*tables.think, *tables.calls, *(tables.fmt.section or ())[:1]]
    if isinstance(body, Channels):
        return prefill[prefill.rindex(body.start) :] if body.start in prefill else prefill
    at = max((prefill.rfind(mark) for mark in opens), default=-1)
    section = prefill.rfind(tables.fmt.section[0]) if tables.fmt.section else -1
    begun = prefill[section if 0 <= section < at else at :] if at >= 0 else ""
    return "" if any(end in begun for end in tables.think.values()) else begun


def parse(
    text: str | bytes,
    format: str | Format,  # noqa: A002 - the public name
    tools: Sequence[Any] | None = None,
    *,
    prefill: str | None = None,
) -> ParsedMessage:
    """Take one assistant turn apart. Never raises on what a model wrote, evaluates nothing, loses no character."""
    parser = StreamParser(format, tools, prefill=prefill, silent=True)
    parser.feed(text)
    return parser.finish()
