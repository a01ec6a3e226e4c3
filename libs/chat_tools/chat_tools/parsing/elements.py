"""Read a call whose arguments are elements, such as `<city>Paris</city>`, nested where a value is a list or an object.

Strategy
1. Tags are known by a prefix that text does not have, so each is taken at its word: elements are read with a stack.
2. A call counts when its elements are all closed and its own closing tag comes, or what can only come after it; cut off
   by the end of the text, if every argument that the tool declares has been given.
3. The schema says what an element with others in it is, a list or an object. Where nobody says, the elements of a list
   are all called `item`; a name that comes twice in an object is a list of its values.

Invariants (tests): a half-written value is never executed; each character is read once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from chat_tools.known_formats.grammar import Elements, Format
from chat_tools.parsing.arguments import Schema, ToolSet, allowed_types, from_text, resolve
from chat_tools.parsing.cursor import TOO_DENSE, Marks, Reader, Wait
from chat_tools.parsing.literals import dumps
from chat_tools.parsing.segments import Recorder
from chat_tools.parsing.tagged import NO_ARGUMENT, STRAY, has_all

_TAG_COST = 10
_NAME = 200  # the longest name of an element
_DEPTH = 64


class Element(NamedTuple):
    """An element: its name, the pieces of its text, and the elements in it."""

    name: str
    texts: list[str]
    children: list[Element]


class ElementTables:
    """The compiled elements of one format."""

    def __init__(self, fmt: Format) -> None:
        assert isinstance(fmt.body, Elements)
        self.body = fmt.body
        self.opening, self.closing = fmt.calls[0]
        # What can only come after a call: its wrapper's end, another call, the token that ends a turn.
        self.after = (*(fmt.section or ()), *fmt.ends)
        prefix = re.escape(fmt.body.prefix)
        after = "|".join(map(re.escape, (self.opening, *self.after)))
        # No name holds one of these, or which came first would depend on how the text was cut.
        letter = rf"(?!{after})[^<>\n]"
        tag = rf"{prefix}<(?P<shut>/?)(?P<name>(?!/){letter}(?:{letter}){{0,{_NAME}}})>"
        literals = Marks.of([fmt.body.prefix, *fmt.ends])
        longest = max(len(fmt.body.prefix) + _NAME + 5, *map(len, (self.opening, *self.after)))
        self.marks = Marks(re.compile(f"(?P<after>{after})|{tag}"), longest, literals.first)
        self.name_stop = Marks.of([fmt.body.name_end, "\n", "<"])


class ElementReader:
    """A reader of one call, from after its opening marker."""

    __slots__ = ("notes", "reader", "recorder", "tables", "tools")

    def __init__(self, reader: Reader, recorder: Recorder, tables: ElementTables, tools: ToolSet) -> None:
        self.reader = reader
        self.recorder = recorder
        self.tables = tables
        self.tools = tools
        self.notes: list[str] = []

    def read(self) -> Wait[str | None]:
        """Read to the end of the call and record it, or return why it is malformed at this position."""
        self.notes = []
        reader, tables = self.reader, self.tables
        start = reader.pos
        match = yield from reader.search(tables.name_stop)
        name = reader.slice(start, reader.pos).strip()
        if match is None or match.group() != tables.body.name_end:
            return "the tool's name is not closed"
        reader.pos += len(tables.body.name_end)
        if not name:
            return "the tool's name is empty"
        whole = Element(name, [], [])
        while True:
            start = reader.pos
            match = yield from reader.search(tables.marks)
            between = reader.slice(start, reader.pos).strip()
            if match is None:
                if between or not has_all(self.tools.get(name), {child.name for child in whole.children}):
                    return "the text ends inside the call"
                return self._record(whole, "the call's closing tag is missing")
            if between:
                self.notes.append(STRAY)
            if match["after"]:
                return self._record(whole, "the call's closing tag is missing")
            if match.group() == tables.closing:
                return self._record(whole, closing=len(tables.closing))
            reader.pos += len(match.group())
            if match["shut"]:
                return f"the closing tag of {match['name']!r} closes nothing"
            reason = yield from self._element(whole, match["name"])
            if reason:
                return reason

    def _element(self, whole: Element, name: str) -> Wait[str | None]:
        """Read an argument, after its opening tag, with all elements in it."""
        reader = self.reader
        open_ = [whole, Element(name, [], [])]
        while len(open_) > 1:
            start = reader.pos
            match = yield from reader.search(self.tables.marks)
            if not reader.charge(_TAG_COST):
                return TOO_DENSE
            open_[-1].texts.append(reader.slice(start, reader.pos))
            if match is None or match["after"]:
                return f"argument {name!r} is not closed"
            if match["shut"]:
                if match["name"] != open_[-1].name:
                    return f"argument {name!r} is not closed"
                done = open_.pop()
                open_[-1].children.append(done)
            elif len(open_) > _DEPTH:
                return f"argument {name!r} is nested too deep"
            else:
                open_.append(Element(match["name"], [], []))
            reader.pos += len(match.group())
        return None

    def _record(self, whole: Element, note: str = "", closing: int = 0) -> str | None:
        """Record the call with the arguments read so far, or return why it is none: its body is no argument."""
        if STRAY in self.notes and not whole.children:
            return NO_ARGUMENT
        self.reader.pos += closing
        if note:
            self.notes.append(note)
        schema = self.tools.get(whole.name) or {}
        values = _object(whole, schema, schema, self.notes, self.tables.body.item)
        self.tools.check(whole.name, values, self.notes)
        self.recorder.call(self.reader.pos, whole.name, dumps(values), self.notes)
        return None


def _value(element: Element, schema: Any, root: Schema, notes: list[str], item: str) -> Any:
    """Return the value of an element under its schema."""
    schema = resolve(schema, root)
    types = allowed_types(schema, root)
    if not element.children:
        text = "".join(element.texts)
        if not schema:
            return text
        if not text.strip() and "string" not in types and types & {"array", "object"}:
            return [] if "array" in types else {}
        return from_text(text, schema, root, [], element.name)  # what does not fit is said by ToolSet.check
    either = ("array" in types) == ("object" in types)
    is_list = all(child.name == item for child in element.children) if either else "array" in types
    if not is_list:
        return _object(element, _part(schema, "object", root), root, notes, item)
    _no_text(element, notes)
    part = _part(schema, "array", root)
    first = part.get("prefixItems")
    first = first if isinstance(first, list) else []
    rest = [part.get("items")] * max(0, len(element.children) - len(first))
    schemas = zip(element.children, [*first, *rest], strict=False)
    return [_value(child, of_child, root, notes, item) for child, of_child in schemas]


def _object(element: Element, schema: Schema, root: Schema, notes: list[str], item: str) -> dict[str, Any]:
    """Return the object of an element with named elements in it; values of one name make a list."""
    _no_text(element, notes)
    properties, extra = schema.get("properties"), schema.get("additionalProperties")
    known = properties if isinstance(properties, Mapping) else {}
    by_name: dict[str, list[Any]] = {}
    for child in element.children:
        value = _value(child, known.get(child.name, extra), root, notes, item)
        by_name.setdefault(child.name, []).append(value)
    return {name: values[0] if len(values) == 1 else values for name, values in by_name.items()}


def _no_text(element: Element, notes: list[str]) -> None:
    if "".join(element.texts).strip():
        notes.append(f"text beside the elements of {element.name!r} was left out")


def _part(schema: Schema, kind: str, root: Schema) -> Schema:
    """Return the first of a schema's alternatives that describes a value of this kind."""
    words = ("items", "prefixItems") if kind == "array" else ("properties", "additionalProperties")
    unions = [schema.get(union) for union in ("anyOf", "oneOf")]
    parts = [resolve(part, root) for union in unions if isinstance(union, list) for part in union]
    return next((part for part in (schema, *parts) if any(word in part for word in words)), schema)
