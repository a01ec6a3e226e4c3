"""The compiled form of a format: its markers, and the reader of its calls, by its grammar."""

from __future__ import annotations

from chat_tools.known_formats.grammar import Channels, Elements, Format, Json, Tagged
from chat_tools.parsing.arguments import ToolSet
from chat_tools.parsing.bracketed import BracketReader, BracketTables
from chat_tools.parsing.channels import ChannelReader, ChannelTables
from chat_tools.parsing.cursor import NAME_END, Marks, Reader, Wait
from chat_tools.parsing.elements import ElementReader, ElementTables
from chat_tools.parsing.preview_tables import PreviewTables
from chat_tools.parsing.segments import Recorder
from chat_tools.parsing.tagged import TaggedReader, TaggedTables

BodyTables = TaggedTables | ElementTables | BracketTables | ChannelTables
BodyReader = TaggedReader | ElementReader | BracketReader | ChannelReader


def compile_body(fmt: Format, stops: list[str], thinking: list[str]) -> BodyTables:
    """Return the compiled tables of a format's calls; `stops` and `thinking` are the markers around them."""
    if isinstance(fmt.body, Tagged):
        return TaggedTables(fmt)
    if isinstance(fmt.body, Elements):
        return ElementTables(fmt)
    if isinstance(fmt.body, Channels):
        return ChannelTables(fmt.body)
    return BracketTables(fmt, stops, thinking)


def body_reader(tables: BodyTables, reader: Reader, recorder: Recorder, tools: ToolSet) -> BodyReader:
    """Return the reader for these tables."""
    if isinstance(tables, TaggedTables):
        return TaggedReader(reader, recorder, tables, tools)
    if isinstance(tables, ElementTables):
        return ElementReader(reader, recorder, tables, tools)
    if isinstance(tables, BracketTables):
        return BracketReader(reader, recorder, tables, tools)
    return ChannelReader(reader, recorder, tables, tools)


class Tables:
    """The markers of a format, compiled; one per format and process."""

    def __init__(self, fmt: Format) -> None:
        self.fmt = fmt
        self.think = dict(fmt.reasoning)
        self.think_end = {closing: Marks.of([closing]) for closing in self.think.values()}
        self.first_opens = [fmt.section[0]] if fmt.section else [opening for opening, _ in fmt.calls]
        self.think_end_or_call = {closing: Marks.of([closing, *self.first_opens]) for closing in self.think.values()}
        self.calls = dict(fmt.calls)
        self.call_opens = list(self.calls)
        self.call_closes = [closing for closing in self.calls.values() if closing]
        section = [*(fmt.section or ())]
        stops = [*section, *self.call_opens, *self.call_closes, *fmt.ends]
        body = fmt.body
        channels = [body.start, body.channel, *body.ends] if isinstance(body, Channels) else []
        headers = [fmt.recipients.mark] if fmt.recipients is not None else []
        places = [stop for stop in stops if not headers or stop not in section[:1]]  # a section behind headers alone
        self.top = Marks.of([*self.think, *self.think_end, *places, *channels, *headers])
        self.ends = Marks.of(fmt.ends) if fmt.ends else self.top
        self.ends_or_header = Marks.of([*fmt.ends, *headers]) if headers else self.ends
        # What ends thinking that is not closed, where the format says so: a call's opener, or a message's header.
        self.reasoning_ends = [fmt.recipients.message] if fmt.recipients is not None else self.first_opens
        # An end of thinking that ends all else too says nothing of what stands before it.
        self.thinking = frozenset([*self.think, *(closing for closing in self.think_end if closing not in fmt.ends)])
        self.may_be_open = self.thinking > self.think.keys()
        self.resync = Marks.of(stops) if stops else self.top
        self.inside = Marks.of([*stops, *self.thinking]) if section else self.top  # what ends text inside a section
        # An opening marker that looks like a special token is one wherever it stands; others are quoted in texts too.
        self.certain = frozenset(mark for mark in self.call_opens if mark.startswith(("<|", "<｜")))
        # What may close a call that begins the answer without a marker.
        self.bare_close = self.call_closes[0] if fmt.opening and isinstance(body, Json) and body.header else ""
        self.body = compile_body(fmt, stops, list(self.thinking))
        has_objects = isinstance(body, Tagged) and body.objects
        self.objects = BracketTables(fmt._replace(body=Json()), stops, []) if has_objects else None
        self.preview = PreviewTables(fmt)


_TABLES: dict[Format, Tables] = {}


def tables_of(fmt: Format) -> Tables:
    """Return the compiled markers of a format. Cached."""
    tables = _TABLES.get(fmt)
    if tables is None:
        tables = _TABLES[fmt] = Tables(fmt)
    return tables


def is_announced(tables: Tables, body: BodyReader) -> Wait[bool]:
    """Return whether a call's header and its object come next; the header of content is read (`Format.prompt_end`)."""
    assert isinstance(body, BracketReader)
    reader, pattern, said = body.reader, body.tables.header, tables.fmt.prompt_end[1]
    if (yield from reader.at([said])):
        reader.pos += len(said)
        body.recorder.closes("content", reader.pos)
        return False
    start = reader.pos
    match = yield from reader.search(body.tables.header_end)
    header = reader.slice(start, reader.pos)
    reader.move_back(start)
    return match is not None and match.group() == "{" and pattern is not None and pattern.fullmatch(header) is not None


def is_call_header(tables: Tables, reader: Reader) -> Wait[bool]:
    """Return whether the header of a message with calls comes next."""
    start, header, section = reader.pos, tables.fmt.recipients, tables.fmt.section
    assert header is not None
    assert section is not None
    reader.pos = begin = start + len(header.mark)
    yield from reader.search(NAME_END)
    name = reader.slice(begin, reader.pos)
    found = name not in (header.reasoning, header.content) and (yield from reader.at([header.message + section[0]]))
    reader.move_back(start)
    return bool(found)


def unfinished_part(tables: Tables, prefill: str) -> str:
    """Return the part of the prompt's text that the answer continues."""
    if not prefill:
        return ""
    body = tables.fmt.body
    opens = [*tables.think, *tables.calls, *(tables.fmt.section or ())[:1]]
    if isinstance(body, Channels):
        return prefill[prefill.rindex(body.start) :] if body.start in prefill else prefill
    at = max((prefill.rfind(mark) for mark in opens), default=-1)
    section = prefill.rfind(tables.fmt.section[0]) if tables.fmt.section else -1
    unfinished = prefill[section if 0 <= section < at else at :] if at >= 0 else ""
    return "" if any(end in unfinished for end in tables.think.values()) else unfinished
