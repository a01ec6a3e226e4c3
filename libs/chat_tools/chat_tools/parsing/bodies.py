"""Which reader reads a format's calls, by its grammar."""

from __future__ import annotations

from chat_tools.parsing.arguments import ToolSet
from chat_tools.parsing.bracketed import BracketReader, BracketTables
from chat_tools.parsing.channels import ChannelReader, ChannelTables
from chat_tools.parsing.cursor import Reader
from chat_tools.parsing.elements import ElementReader, ElementTables
from chat_tools.parsing.grammar import Channels, Elements, Format, Tagged
from chat_tools.parsing.segments import Recorder
from chat_tools.parsing.tagged import TaggedReader, TaggedTables

BodyTables = TaggedTables | ElementTables | BracketTables | ChannelTables
BodyReader = TaggedReader | ElementReader | BracketReader | ChannelReader


def compile_body(fmt: Format, stops: list[str], thinking: list[str]) -> BodyTables:
    """What a format's calls compile to; `stops` and `thinking` are the markers that stand around them."""
    if isinstance(fmt.body, Tagged):
        return TaggedTables(fmt)
    if isinstance(fmt.body, Elements):
        return ElementTables(fmt)
    if isinstance(fmt.body, Channels):
        return ChannelTables(fmt.body)
    return BracketTables(fmt, stops, thinking)


def body_reader(tables: BodyTables, reader: Reader, recorder: Recorder, tools: ToolSet) -> BodyReader:
    """The reader of such calls."""
    if isinstance(tables, TaggedTables):
        return TaggedReader(reader, recorder, tables, tools)
    if isinstance(tables, ElementTables):
        return ElementReader(reader, recorder, tables, tools)
    if isinstance(tables, BracketTables):
        return BracketReader(reader, recorder, tables, tools)
    return ChannelReader(reader, recorder, tables, tools)
