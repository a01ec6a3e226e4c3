"""The engine: `parse` is the fold of `StreamParser.feed`, so a stream gives what the whole text gives.

Strategy
1. A coroutine walks over the turn from marker to marker; each `yield` asks for more text. What is taken goes to the
   Recorder, whose segments follow each other without a gap.
2. A marker of calls hands over to the reader of the format's body (argument_bodies.py), which records calls or says in
   words why there is none.
3. What cannot be read is malformed up to where something else can begin: the next marker that is sure to be one.
4. What is looked at is charged to a budget (cursor.py); past it, text is passed over unread.

Invariants (tests): the segments cover the text; any cuts of a stream give what the whole gives; the operations grow
with the length of the text; no text raises; a call that was reported is in the result.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import Any

from chat_tools.known_formats.grammar import Channels, Format, Recipients
from chat_tools.parsing.argument_bodies import body_reader, is_announced, is_call_header, tables_of, unfinished_part
from chat_tools.parsing.arguments import ToolSet
from chat_tools.parsing.bracketed import NOT_A_CALL, BracketReader
from chat_tools.parsing.channels import ChannelReader
from chat_tools.parsing.cursor import CALL_COST, MARKER_COST, NAME_END, TOO_DENSE, Marks, Reader, TextDecoder, Wait
from chat_tools.parsing.elements import ElementReader
from chat_tools.parsing.formats import find_format
from chat_tools.parsing.preview import Preview
from chat_tools.parsing.result import Event, Kind, ParsedMessage, Segment
from chat_tools.parsing.segments import Recorder
from chat_tools.parsing.tagged import TaggedReader
from chat_tools.parsing.token_text import TokenText


class StreamParser:
    """A parser of a model's output in pieces of any size.

    `prefill` is what the prompt already holds of this turn (Qwen3.5's ends in "<think>\\n", others' in nothing: ""):
    read first, not reported. **Servers pass it**: each call is then told as it comes, its name first. Without it (None)
    nobody knows whether the turn begins inside a block of reasoning: a closing marker that nobody opened makes all
    before it reasoning, calls too, and the stream says so by `Retracted`. So that no call is executed that is retracted
    later, all events of calls then wait until reasoning has been seen, or for `last_events()` at the end; text does
    not wait. A format whose reasoning is no block (harmony) needs no prefill. `tools` (dicts or typed functions) give
    the arguments their types. A `silent` parser reports no events, which is a little faster.

    With a (fast) `tokenizer` the parser is fed with token ids: special tokens are markers, and the same characters
    written by the model are text. `call_ends_reasoning` says whether a call's opening marker ends thinking that is not
    closed. By default it does where the format's own engine does so and the marker is a special token; in text, where
    a model may quote it, it does not.
    """

    def __init__(
        self,
        format: str | Format,  # noqa: A002 - the public name
        tools: Sequence[Any] | None = None,
        *,
        prefill: str | None = None,
        silent: bool = False,
        tokenizer: Any = None,
        call_ends_reasoning: bool | None = None,
    ) -> None:
        tables = self.tables = tables_of(find_format(format))
        self._tokens = None if tokenizer is None else TokenText(tokenizer, tables.fmt)
        if call_ends_reasoning is None:
            special = () if self._tokens is None else self._tokens.markers
            sure = all(any(marker in opening for marker in special) for opening in tables.reasoning_ends)
            call_ends_reasoning = tables.fmt.call_ends_reasoning and sure
        self._think_end = tables.think_end_or_call if call_ends_reasoning else tables.think_end
        self._message_end = tables.ends_or_header if call_ends_reasoning else tables.ends
        unfinished = unfinished_part(tables, prefill or tables.fmt.prompt_end[0])
        self._reader = Reader()
        self._recorder = Recorder(len(unfinished), silent)
        tool_set = ToolSet(tools)
        self._body = body_reader(tables.body, self._reader, self._recorder, tool_set)
        self._objects = tables.objects and BracketReader(self._reader, self._recorder, tables.objects, tool_set)
        # Whether it is known what is reasoning: where the prompt is known, or the format has none.
        if not silent:
            self._recorder.preview = Preview(tables.preview, tool_set, self._recorder.tell)
        self._thought = prefill is not None or not tables.may_be_open
        self._recorder.holding = not self._thought
        self._decoder = TextDecoder()
        self._run: Generator[None, None, None] | None = self._turn()
        self._message: ParsedMessage | None = None
        self._append(unfinished)

    def feed(self, text: str | bytes | Sequence[int]) -> list[Event]:
        """Parse more text (with a tokenizer, token ids) and return the events that it settled.

        Bytes are UTF-8, and may be cut within a character.
        """
        if self._message is not None:
            raise ValueError("this parser is finished: make a new StreamParser for the next turn")
        self._append(self._decoded(text))
        if self._recorder.preview is not None and self._run is not None:
            in_list = isinstance(self._body, BracketReader) and self._body.in_list
            self._recorder.preview.look(self._reader, self._recorder.cursor, in_list)
        return self._events()

    def finish(self, text: str | bytes | Sequence[int] = "") -> ParsedMessage:
        """End the text, with a last piece of it, and return the whole message. Further calls return the same."""
        if self._message is None:
            text = self._decoded(text) + self._decoder.finish()
            if self._tokens is not None:
                text += self._tokens.finish()
            self._reader.final = True
            self._append(text)
            self._recorder.release()
            message = self._recorder.message(self._reader.text(), self._reader.operations)
            self._message = message if self._tokens is None else self._tokens.message(message)
        return self._message

    def _decoded(self, text: str | bytes | Sequence[int]) -> str:
        if not isinstance(text, str | bytes):
            if self._tokens is None:
                raise ValueError("token ids are parsed with a tokenizer: StreamParser(format, tokenizer=tokenizer)")
            return self._tokens.feed(text)
        if text and self._tokens is not None:
            raise ValueError("a parser with a tokenizer is fed with token ids: give their text to one without")
        return self._decoder.feed(text)

    def last_events(self) -> list[Event]:
        """Return the events that the end of the text settled; call it after `finish`."""
        return self._events()

    def segments(self, first: int = 0) -> list[Segment]:
        """Return the settled segments from this index on; the last one may still grow.

        Segments that are all the prompt's are counted; they end where the text begins.
        """
        return self._recorder.segments(first)

    def _events(self) -> list[Event]:
        events, self._recorder.events = self._recorder.events, []
        return events if self._tokens is None else self._tokens.events(events)

    def _append(self, text: str) -> None:
        self._reader.append(text)
        if self._run is not None and next(self._run, self) is self:
            self._run = None

    def _turn(self) -> Generator[None, None, None]:
        """Read a turn: text, blocks of reasoning, calls."""
        reader, recorder, tables = self._reader, self._recorder, self.tables
        think, thinking, ends, top = tables.think, tables.thinking, tables.fmt.ends, tables.top
        channels = self._body if isinstance(self._body, ChannelReader) else None
        yield from self._opening()
        if channels is not None:
            yield from channels.read_started()
        while True:
            while (match := self._text("content", top)) is None:
                if reader.final:
                    return
                yield
            mark, start = match.group(), reader.pos
            if mark in think:
                reader.pos += len(mark)
                self._thought = True
                recorder.release()
                recorder.opens("reasoning", reader.pos)
                yield from self._reasoning(self._think_end[think[mark]])
                yield from self._opening()
            elif mark in thinking and not self._thought:
                reader.pos += len(mark)
                self._thought = True
                recorder.retract(reader.pos, start, reader.slice(0, start))
                yield from self._opening()
            elif not reader.charge(MARKER_COST):
                yield from self._pass_over()
            elif mark in ends:
                reader.pos += len(mark)
                recorder.closes("content", reader.pos)
            elif tables.fmt.recipients is not None and mark == tables.fmt.recipients.mark:
                yield from self._message_for(tables.fmt.recipients)
            elif channels is not None and mark in channels.tables.opens:
                yield from channels.read()
            else:
                reader.pos += len(mark)
                yield from self._marker(mark, start)

    def _pass_over(self) -> Wait[None]:
        """Record text as malformed, unread, until the budget allows more, or up to reasoning, which must be known."""
        reader, tables = self._reader, self.tables
        goal = reader.allowed_from()
        known = tables.think if self._thought else tables.thinking
        while True:
            match = reader.step(tables.top)
            if match is None and not reader.final:
                yield
                continue
            if match is None or reader.pos >= goal or match.group() in known:
                break
            reader.pos += len(match.group())
        self._recorder.malformed(reader.pos, TOO_DENSE)

    def _marker(self, mark: str, start: int) -> Wait[None]:
        """Continue after a marker of calls."""
        fmt, recorder, reader = self.tables.fmt, self._recorder, self._reader
        if fmt.section and mark == fmt.section[0]:
            yield from self._section()
        elif mark in self.tables.calls:
            within = fmt.section and not (fmt.bare and reader.at_line_start(start))
            if within or (fmt.prompt_end[0] and not (yield from is_announced(self.tables, self._body))):
                recorder.text("content", reader.pos, mark)
            else:
                yield from self._call(mark)
        elif mark in self.tables.thinking:
            recorder.malformed(reader.pos, "the end of a reasoning block that was not opened")
            yield from self._opening()
        elif isinstance(fmt.body, Channels):
            recorder.closes("content", reader.pos)
        else:
            recorder.malformed(reader.pos, f"{mark} closes nothing")

    def _message_for(self, header: Recipients) -> Wait[None]:
        """Read a message's header, and the call or the reasoning after it."""
        reader, recorder, section = self._reader, self._recorder, self.tables.fmt.section
        begin = reader.pos = reader.pos + len(header.mark)
        yield from reader.search(NAME_END)
        name = reader.slice(begin, reader.pos)
        if not (yield from reader.at([header.message])):
            reader.move_back(begin)
            recorder.text("content", begin, header.mark)
            return
        reader.pos += len(header.message)
        if name == header.reasoning:
            recorder.opens("reasoning", reader.pos)
            yield from self._reasoning(self._message_end)
        elif name != header.content and section and (yield from reader.at([section[0]])):
            reader.pos += len(section[0])
            yield from self._section()
        else:
            recorder.closes("content", reader.pos)

    def _text(self, kind: Kind, marks: Marks) -> re.Match[str] | None:
        """Record text of a kind up to the next marker, or as much as has come."""
        reader, recorder = self._reader, self._recorder
        match = reader.step(marks)
        start, end = recorder.cursor, reader.pos
        if start != end:
            recorder.text(kind, end, "" if recorder.silent else reader.slice(start, end))
        return match

    def _reasoning(self, marks: Marks) -> Wait[None]:
        reader, header = self._reader, self.tables.fmt.recipients
        while (match := self._text("reasoning", marks)) is None or (header and match.group() == header.mark):
            if match and header:
                if (yield from is_call_header(self.tables, reader)):
                    return
                reader.pos += len(header.mark)
                self._recorder.text("reasoning", reader.pos, header.mark)
            elif reader.final:
                return
            else:
                yield
        if match.group() in self.tables.first_opens:
            return
        self._reader.pos += len(match.group())
        self._recorder.closes("reasoning", self._reader.pos)

    def _opening(self) -> Wait[None]:
        """Read calls that need no marker, where an answer begins with them."""
        opening, reader = self.tables.fmt.opening, self._reader
        while opening:
            before = reader.charged
            if not reader.charge(CALL_COST):
                return
            start = reader.pos
            if (reader.peek() or (yield from reader.next())) != opening[0]:
                reader.move_back(start)
                return
            if not (yield from reader.at([opening])) or not isinstance(self._body, BracketReader):
                reader.move_back(start)
                return
            reason = yield from self._body.read(self.tables.bare_close, bare=True)
            reader.cap_call(before)
            if reason == NOT_A_CALL:
                reader.move_back(start)
                return
            if reason is not None:
                yield from self._give_up(reason)
                return
            after = reader.pos
            if (yield from reader.next()) == ";":
                reader.pos += 1
            else:
                reader.move_back(after)

    def _section(self) -> Wait[None]:
        """Read a wrapper and the calls in it; it ends at its closing marker, or where text begins after a call.

        Text before the first call, or between calls, is malformed and takes no call with it: it is known by what comes
        next, a call of this section or its end.
        """
        reader, recorder, fmt = self._reader, self._recorder, self.tables.fmt
        assert fmt.section is not None
        calls = 0
        reader.charged += CALL_COST // 2
        while True:
            if not reader.peek():
                yield from reader.space()
            mark = yield from reader.at([*self.tables.call_opens, fmt.section[1]])
            if mark in self.tables.calls or (self._objects is not None and reader.peek() == "{"):
                reader.pos += len(mark or "")
                yield from self._call(mark or "")
                calls += 1
            elif mark == fmt.section[1] and calls:
                reader.pos += len(mark)
                recorder.extend(reader.pos)
                return
            elif not (yield from self._noise(calls)):
                if calls:
                    recorder.note("the closing marker is missing")
                else:
                    yield from self._give_up("no call inside the block")
                return

    def _noise(self, calls: int) -> Wait[bool]:
        """Record text inside a section as malformed, if a call or (after one) the section's end follows; else stay."""
        reader, tables = self._reader, self.tables
        start = reader.pos
        match = yield from reader.search(tables.inside)
        assert tables.fmt.section is not None
        ends = [*tables.calls, *tables.fmt.section[1:]] if calls else tables.calls
        if match is None or reader.pos == start or match.group() not in ends:
            reader.move_back(start)
            return False
        self._recorder.malformed(reader.pos, "text inside the block that is no call")
        reader.charged += MARKER_COST
        return True

    def _call(self, opened: str) -> Wait[None]:
        before = self._reader.charged
        if not self._reader.charge(CALL_COST):
            yield from self._pass_over()
            return
        body = self._body if opened else self._objects
        if isinstance(body, TaggedReader | ElementReader):
            reason = yield from body.read()
        else:
            assert isinstance(body, BracketReader)
            reason = yield from body.read(self.tables.calls.get(opened, ""))
        self._reader.cap_call(before)
        if reason is not None:
            yield from self._give_up(reason)
        elif self.tables.fmt.opening and not self.tables.calls[opened]:
            yield from self._further()

    def _further(self) -> Wait[None]:
        """Read calls after a semicolon, which have no marker of their own."""
        reader = self._reader
        after = reader.pos
        if (yield from reader.next()) == ";":
            reader.pos += 1
            if (yield from reader.next()) == self.tables.fmt.opening:
                yield from self._opening()
                return
        reader.move_back(after)

    def _give_up(self, reason: str) -> Wait[None]:
        """Record text as malformed up to where something else can begin."""
        reader, fmt, tables = self._reader, self.tables.fmt, self.tables
        while True:
            match = yield from reader.search(tables.resync)
            if match is None:
                break
            mark = match.group()
            if mark in fmt.ends or (fmt.section and mark == fmt.section[0]):
                break
            if mark in tables.calls:
                if mark in tables.certain or reader.at_line_start(reader.pos) or not fmt.section or not fmt.bare:
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


def parse(
    text: str | bytes,
    format: str | Format,  # noqa: A002 - the public name
    tools: Sequence[Any] | None = None,
    *,
    prefill: str | None = None,
    call_ends_reasoning: bool | None = None,
) -> ParsedMessage:
    """Parse one assistant turn.

    `prefill` is the part of the turn in the prompt; it and `call_ends_reasoning` are StreamParser's. No text of a model
    raises, nothing is evaluated, no character is lost. ValueError for an unknown format or a tool that is no tool.
    """
    parser = StreamParser(format, tools, prefill=prefill, silent=True, call_ends_reasoning=call_ends_reasoning)
    return parser.finish(text)
