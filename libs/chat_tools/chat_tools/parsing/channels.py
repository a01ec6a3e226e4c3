"""Read turns made of messages with headers, as gpt-oss writes them (harmony).

A header names a channel and perhaps a recipient: what goes to a function is a call, the analysis channel is reasoning,
all else is content.
"""

from __future__ import annotations

import re

from chat_tools.known_formats.grammar import Channels
from chat_tools.parsing.arguments import ToolSet
from chat_tools.parsing.cursor import CALL_COST, Marks, Reader, Wait
from chat_tools.parsing.literals import LiteralError, dumps, loads
from chat_tools.parsing.result import Kind
from chat_tools.parsing.segments import Recorder


class ChannelTables:
    """The compiled markers of a channel format."""

    def __init__(self, body: Channels) -> None:
        self.body = body
        self.opens = (body.start, body.channel)
        self.header = Marks.of([body.message, *self.opens, *body.ends])
        self.again = Marks.of([body.message, body.start, *body.ends])
        self.inside = Marks.of([*self.opens, *body.ends])
        self.recipient = re.compile(body.recipient)
        self.name = re.compile(rf"{re.escape(body.channel)}\s*(\w+)")


class ChannelReader:
    """A reader of one message, from its header's first marker."""

    __slots__ = ("reader", "recorder", "tables", "tools")

    def __init__(self, reader: Reader, recorder: Recorder, tables: ChannelTables, tools: ToolSet) -> None:
        self.reader = reader
        self.recorder = recorder
        self.tables = tables
        self.tools = tools

    def read_started(self) -> Wait[None]:
        """Read a message whose header the prompt began (` to=functions.f<|channel|>...`), if the answer is one."""
        reader, start, words = self.reader, self.reader.pos, ""
        for length in range(1, 5):
            words = (yield from reader.need(length)).removeprefix(" ")
            if not "to=".startswith(words[:3]):
                return
        match = yield from reader.search(self.tables.header)
        is_header = match is not None and match.group() in (self.tables.body.channel, self.tables.body.message)
        reader.move_back(start)
        if is_header and words.startswith("to="):
            yield from self.read(started=True)

    def read(self, started: bool = False) -> Wait[None]:
        """Read a header, whose first marker the prompt may hold, and the text that belongs to it."""
        reader, tables, body = self.reader, self.tables, self.tables.body
        start = reader.pos
        reader.charged += CALL_COST // 3
        if not started:
            reader.pos += len(body.start if reader.window.startswith(body.start, start - reader.base) else body.channel)
        match = yield from reader.search(tables.header)
        if match is not None and match.group() == body.channel:  # <|start|>assistant<|channel|>...
            reader.pos += len(body.channel)
            match = yield from reader.search(tables.again)
        if match is None or match.group() != body.message:
            reason = "the text ends inside a header" if match is None else "a header without a message"
            self.recorder.malformed(reader.pos, reason)
            return
        header = reader.slice(start, reader.pos)
        reader.pos += len(body.message)
        recipient = tables.recipient.search(header)
        channel = tables.name.search(header)
        if recipient is not None:
            yield from self._call(recipient["name"])
            return
        reasoning = channel is not None and channel.group(1) == body.reasoning
        yield from self._words("reasoning" if reasoning else "content")

    def _words(self, kind: Kind) -> Wait[None]:
        """Record the text of a message as it comes."""
        self.recorder.opens(kind, self.reader.pos)
        while True:
            match = self.reader.step(self.tables.inside)
            self._take(kind)
            if match is not None and match.group() in self.tables.body.ends:
                self.reader.pos += len(match.group())
                self.recorder.closes(kind, self.reader.pos)
            if match is not None or self.reader.final:
                return
            yield

    def _take(self, kind: Kind) -> None:
        start, end = self.recorder.cursor, self.reader.pos
        self.recorder.text(kind, end, "" if self.recorder.silent else self.reader.slice(start, end))

    def _call(self, name: str) -> Wait[None]:
        """Read a call: all of the message has to be its arguments."""
        reader, recorder = self.reader, self.recorder
        reader.charged += CALL_COST
        start = reader.pos
        match = yield from reader.search(self.tables.inside)
        text = reader.slice(start, reader.pos)
        if match is not None and match.group() in self.tables.body.ends:
            reader.pos += len(match.group())
        notes: list[str] = []
        try:
            value = loads(text, notes)
        except LiteralError as error:
            short = "the text ends inside the call" if match is None else f"the arguments are not JSON: {error}"
            recorder.malformed(reader.pos, short)
            return
        if not name or not isinstance(value, dict):
            recorder.malformed(reader.pos, "the arguments are not an object" if name else "the tool's name is empty")
            return
        if match is None:
            notes.append("the call's closing marker is missing")
        self.tools.check(name, value, notes)
        recorder.call(reader.pos, name, dumps(value), notes)
