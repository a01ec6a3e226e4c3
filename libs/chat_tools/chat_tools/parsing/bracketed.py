"""Read calls with arguments in brackets: JSON objects, objects behind a header, Python calls.

Strategy
1. The usual case first: all up to the next marker is one plain JSON object (`_at_once`); nothing else is looked at.
2. Else the object's end is found by counting brackets outside of strings (nested_json.py), so that a marker quoted in a
   string ends nothing; a marker outside of a string ends the object unfinished.
3. The text up to there is read as JSON, then as a literal of Python's kind; nothing is evaluated.
4. In a list each element is recorded as soon as it is complete; a bad one is malformed and the list goes on.
5. An object that no marker announces is a call only if it is meant as one: it has arguments, or a declared tool's name.

Invariants (tests): one bad element takes no good one with it; text is read again at most a fixed number of times.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from chat_tools.known_formats.grammar import Format, Json, Pythonic
from chat_tools.parsing.arguments import ToolSet
from chat_tools.parsing.cursor import CALL_COST, TOO_DENSE, Marks, Reader, Wait
from chat_tools.parsing.literals import (
    FALLBACK,
    LiteralError,
    LiteralParser,
    dumps,
    literal_cost,
    loads,
    loads_plain,
    loads_with_notes,
)
from chat_tools.parsing.nested_json import Brackets, find_end
from chat_tools.parsing.segments import Recorder

_CALL = re.compile(r"\s*(?P<name>[A-Za-z_][\w.\-]*)\s*\(")
_NAME_BEGUN = re.compile(r"[\w.\-\s]*+")
_BEGINS_LIKE_A_CALL = re.compile(r"""\{\s*["'](?:name|type|function|parameters|arguments)["']\s*:""")
_OBJECT = r"""\{\s{0,20}["'](?:name|type|function)["']\s{0,20}:"""
_LONGEST_NAME = 256
NOT_A_CALL = "not a call"


class BracketTables:
    """The compiled brackets of one format."""

    def __init__(self, fmt: Format, stops: list[str], thinking: list[str]) -> None:
        body = fmt.body
        assert isinstance(body, Json | Pythonic)
        self.body = body
        quotes = body.quotes if isinstance(body, Json) else ()
        self.quotes = quotes
        # A marker of reasoning is one too where calls need no marker: there a call is tried after each.
        ends = [*stops, *thinking] if fmt.opening else stops
        self.brackets = Brackets(ends, quotes, triple=isinstance(body, Pythonic))
        self.stop = Marks.of(ends).pattern
        self.closing = {close: re.compile(r"\s*+" + re.escape(close)) for _, close in fmt.calls if close}
        self.header = re.compile(rf"\s*+{body.header}\s*+") if isinstance(body, Json) and body.header else None
        self.header_end = Marks.of(["{", *ends])
        begins = r",\s{0,20}[A-Za-z_][\w.]{0,99}\(" if isinstance(body, Pythonic) else _OBJECT
        pattern = "|".join([begins, *map(re.escape, sorted(stops, key=len, reverse=True))])
        self.element = Marks(re.compile(pattern), 160, Marks.of([",", "{", *stops]).first)


class BracketReader:
    """A reader of one block of calls, from after its opening marker."""

    __slots__ = ("in_list", "no_plain_object_before", "notes", "reader", "recorder", "tables", "tools")

    def __init__(self, reader: Reader, recorder: Recorder, tables: BracketTables, tools: ToolSet) -> None:
        self.reader = reader
        self.recorder = recorder
        self.tables = tables
        self.tools = tools
        self.notes: list[str] = []
        self.in_list = False  # whether calls of the list that is read went before
        self.no_plain_object_before = 0  # up to here all text was looked at in vain: never twice

    def read(self, close: str, bare: bool = False) -> Wait[str | None]:
        """Read to the end of the block and record its calls, or return why it is malformed.

        A `bare` block has no opening marker: for one that is no call, NOT_A_CALL is returned and nothing recorded.
        """
        reader = self.reader
        self.notes = []
        start = reader.pos
        first = reader.peek() or (yield from reader.next())
        body = self.tables.body
        if isinstance(body, Json) and bare and body.lead and (yield from reader.at([body.lead])):
            reader.pos += len(body.lead)
            first = reader.peek() or (yield from reader.next())
        if isinstance(body, Pythonic) and first and not body.brackets and first != "[":
            reason = yield from self._list("", bare, close)
        elif isinstance(body, Pythonic) and not (body.objects and first == "{"):
            opening = "{" if body.objects else ""
            reason = yield from self._list(opening, bare) if first == "[" else self._nothing(first)
        elif isinstance(body, Pythonic):
            reason = yield from self._object(None, None, bare)
        elif body.objects and first == "[":
            reason = yield from self._list("{", bare)
        elif body.objects and first == "{" and body.lines:
            reason = yield from self._list("{", bare, close)
        elif body.objects and first == "{":
            reason = yield from self._object(None, None, bare)
        elif self.tables.header is not None:
            reason = yield from self._headed(bare)
        else:
            reason = yield from self._nothing(first)
        self.in_list = False
        if reason is not None:
            if reader.may_read_again() or reason == NOT_A_CALL:
                reader.move_back(
                    max(start, self.recorder.cursor)
                )  # a marker inside what looked like a string may be the end of the block
            return reason
        if close:
            yield from self._closing(close)
        return None

    def _nothing(self, first: str) -> Wait[str]:
        yield from ()
        return "no call follows the marker" if first else "the text ends inside the call"

    def _closing(self, close: str) -> Wait[None]:
        """Read the closing marker, with stray brackets before it."""
        reader = self.reader
        stray = reader.pos
        if (match := self.tables.closing[close].match(reader.window, stray - reader.base)) is not None:
            reader.pos = reader.base + match.end()
            self.recorder.extend(reader.pos)
            return
        yield from reader.search(_NOT_BRACKET)
        if (yield from reader.at([close])):
            if reader.slice(stray, reader.pos).strip():
                self.recorder.note("brackets too many after the call")
            reader.pos += len(close)
            self.recorder.extend(reader.pos)
        else:
            reader.move_back(stray)
            self.recorder.note("the call's closing marker is missing")

    def _headed(self, bare: bool) -> Wait[str | None]:
        reader, pattern = self.reader, self.tables.header
        assert pattern is not None
        start = reader.pos
        if bare:
            reason = yield from self._headed(False)
            return NOT_A_CALL if reason is not None else None
        match = yield from reader.search(self.tables.header_end)
        header = pattern.fullmatch(reader.slice(start, reader.pos))
        if header is None:
            return "the text ends inside the call" if match is None else "the call's header cannot be read"
        if not header["name"]:
            return "the tool's name is empty"
        if match is None or match.group() != "{":
            return "the text ends inside the call" if match is None else "the call has no arguments"
        identifier = header["id"] if "id" in pattern.groupindex else None
        return (yield from self._object(header["name"], (identifier or "").strip() or None, False))

    def _object(self, name: str | None, identifier: str | None, bare: bool) -> Wait[str | None]:
        """Read an object and record the call; only its end shows whether its text is one value."""
        reader = self.reader
        start = reader.pos
        value = self._at_once()
        broken = (yield from find_end(reader, self.tables.brackets)) if value is FALLBACK else ""
        end = reader.pos
        text = reader.slice(start, end)
        reason = broken or self._record(text, name, identifier, end, value, bare)
        if reason:
            meant = reason != NOT_A_CALL and _BEGINS_LIKE_A_CALL.match(text)
            return reason if meant or not bare else NOT_A_CALL
        body = self.tables.body
        if isinstance(body, Json) and body.after:
            yield from self.reader.space()
            if (yield from self.reader.at([body.after])):
                self.reader.pos += len(body.after)
                self.recorder.extend(self.reader.pos)
            else:
                self.reader.move_back(end)
        return None

    def _at_once(self) -> Any:
        """Move past the object and return it, if all up to the next marker is plain JSON of one; else return FALLBACK.

        In this usual case JSON itself finds the object's end. Not for quotes of another kind.
        """
        reader, tables = self.reader, self.tables
        if tables.quotes or reader.pos < self.no_plain_object_before:
            return FALLBACK
        begin = reader.pos - reader.base
        stop = tables.stop.search(reader.window, begin)
        self.no_plain_object_before = reader.base + stop.start() if stop else reader.end
        if stop is None and not reader.final:
            return FALLBACK
        text = reader.window[begin : stop.start() if stop else None].rstrip()
        if isinstance(tables.body, Json) and tables.body.after:
            text = text.removesuffix(tables.body.after).rstrip()
        if not text.endswith("}"):
            return FALLBACK
        try:
            value = loads_plain(text)
        except LiteralError:
            return FALLBACK
        if value is not FALLBACK:
            reader.pos += len(text)
            reader.operations += len(text)
        return value

    def _record(
        self, text: str, name: str | None, identifier: str | None, end: int, value: Any = FALLBACK, bare: bool = False
    ) -> str | None:
        """Record the call of an object (`value`, if known), or return why it is none.

        A `bare` object, without a marker before it, is a call only if `_is_meant`.
        """
        notes = self.notes = []
        quotes = self.tables.quotes
        try:
            if value is FALLBACK and not quotes:
                value = loads_plain(text)
            if value is FALLBACK:
                self.reader.charged += literal_cost(text)
                literal = LiteralParser(text, notes, quotes=quotes, bare_keys=True) if quotes else None
                value = literal.whole() if literal else loads_with_notes(text, notes)
        except LiteralError as error:
            return f"the arguments are neither JSON nor literals: {error}"
        if name is None:
            if bare and not self._is_meant(value):
                return NOT_A_CALL
            body = self.tables.body
            call = _keyed_object(value) if isinstance(body, Json) and body.keyed else _call_object(value)
            if isinstance(call, str):
                return call
            name, identifier, value = call
        if isinstance(value, str):
            value = _text_object(value)
        if not isinstance(value, dict):
            return "the arguments are not an object"
        self.tools.check(name, value, notes)
        self.recorder.call(end, name, dumps(value), notes, identifier)
        return None

    def _is_meant(self, value: Any) -> bool:
        """Return whether an object of an answer is meant as a call: with arguments, or the name of a declared tool."""
        if not isinstance(value, dict):
            return False
        function = value.get("function")
        inner = function if isinstance(function, dict) else value
        name = inner.get("name", function)
        has_arguments = "arguments" in inner or "parameters" in inner
        return isinstance(name, str) and (has_arguments or self.tools.get(name) is not None)

    def _list(self, opening: str, bare: bool, close: str = "") -> Wait[str | None]:
        """Read a list of objects ("{") or Python calls (""), and record each when it is complete.

        Calls without brackets around them end before `close`, which is not read here.
        """
        reader = self.reader
        reader.pos += not close
        count = 0
        while True:
            if not reader.charge(CALL_COST):
                return TOO_DENSE
            yield from reader.search(_NOT_COMMA)
            first = yield from reader.need(1)
            if close and count and (yield from reader.at([close])):
                return None
            if first == "]" and not close:
                reader.pos += 1
                if not count:
                    return NOT_A_CALL if bare else "an empty list of calls"
                self.recorder.extend(reader.pos)
                return None
            if opening and first == opening:
                reason = yield from self._element(None, bare and not count)
            elif isinstance(self.tables.body, Pythonic) and (call := _CALL.match((yield from self._name()))):
                reason = yield from self._element(call, False)
            else:
                return self._list_end(first, bare and not count)
            if reason is not None:
                return reason
            count += 1
            self.in_list = True

    def _list_end(self, first: str, bare: bool) -> str:
        if bare:
            return NOT_A_CALL
        return "something else than a call in the list" if first else "the text ends inside the list of calls"

    def _name(self) -> Wait[str]:
        """Wait just until a name and its parenthesis are complete, or ruled out, so that the last call is not late."""
        length, most = 1, _LONGEST_NAME + 1
        while True:
            text = yield from self.reader.need(length)
            if len(text) < length or length == most or _CALL.match(text) or not _NAME_BEGUN.fullmatch(text):
                return text
            length = min(most, max(length + 1, min(2 * length, self.reader.end - self.reader.pos)))

    def _element(self, call: re.Match[str] | None, bare: bool) -> Wait[str | None]:
        """Read one element; a bad one with matching brackets is recorded as malformed, and the list continues."""
        reader = self.reader
        if call is not None:
            reader.pos += call.end() - 1
        start = reader.pos
        broken = yield from find_end(reader, self.tables.brackets)
        if broken:
            return (yield from self._next_element(start, broken))
        text = reader.slice(start, reader.pos)
        if call is not None:
            reason = self._record_python(text, call["name"])
        else:
            reason = self._record(text, None, None, reader.pos, bare=bare)
        if reason is not None:
            if bare:
                return NOT_A_CALL
            self.recorder.malformed(reader.pos, reason)
        return None

    def _next_element(self, start: int, reason: str) -> Wait[str | None]:
        """Continue with the apparent next element of the list, after one whose brackets do not match."""
        reader = self.reader
        if reader.may_read_again():
            reader.move_back(start + 1)
        match = yield from reader.search(self.tables.element)
        if match is None or match.group()[0] not in ",{":
            return reason
        self.recorder.malformed(reader.pos, reason)
        return None

    def _record_python(self, text: str, name: str) -> str | None:
        """Record a Python call from its parenthesis, or return why it cannot be read."""
        notes = self.notes = []
        self.reader.charged += literal_cost(text)
        parser = LiteralParser(text, notes, pos=1)
        values: dict[str, Any] = {}
        try:
            while not parser.take(")"):
                parser.skip()
                keyword = _KEYWORD.match(text, parser.pos)
                if keyword is None:
                    return "an argument without a keyword"
                parser.pos = keyword.end()
                if keyword[1] in values:
                    notes.append(f"duplicate key {keyword[1]!r}: the last one counts")
                values[keyword[1]] = parser.value(0)
                if not parser.take(",") and not text.startswith(")", parser.pos):
                    return "no comma between the arguments"
        except LiteralError as error:
            return f"an argument is not a literal: {error}"
        self.tools.check(name, values, notes)
        self.recorder.call(self.reader.pos, name, dumps(values), notes)
        return None


def _call_object(value: Any) -> tuple[str, str | None, Any] | str:
    """Return the name, id and arguments of a call's object, or why it is no call."""
    if not isinstance(value, dict):
        return "the call is not an object"
    function = value.get("function")
    inner: Mapping[str, Any] = function if isinstance(function, dict) else value
    name = inner.get("name", inner.get("tool_name", function if isinstance(function, str) else None))
    if not isinstance(name, str):
        return "the call has no name"
    if not name:
        return "the tool's name is empty"
    identifier = value.get("id", value.get("tool_call_id"))
    for key in ("arguments", "parameters"):
        if key in inner:
            arguments = inner[key]
            return name, identifier if isinstance(identifier, str) else None, {} if arguments is None else arguments
    if set(inner) - {"name", "type", "id", "index"}:
        return "the call has no arguments"
    return name, identifier if isinstance(identifier, str) else None, {}


def _keyed_object(value: Any) -> tuple[str, None, Any] | str:
    """Return the name and arguments of `{NAME: {...}}`, or why it is no call."""
    if not isinstance(value, dict) or len(value) != 1:
        return "the call is not an object with one key"
    ((name, arguments),) = value.items()
    return (name, None, {} if arguments is None else arguments) if name else "the tool's name is empty"


def _text_object(text: str) -> Any:
    """Read arguments that are JSON text within the JSON."""
    try:
        return loads(text)
    except LiteralError:
        return text


_KEYWORD = re.compile(r"([A-Za-z_]\w*)\s*=\s*")
_NOT_BRACKET = Marks(re.compile(r"[^\s\]})]"), 1, re.compile(r"[^\s\]})]"))
_NOT_COMMA = Marks(re.compile(r"[^\s,;]"), 1, re.compile(r"[^\s,;]"))
