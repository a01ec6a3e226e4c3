"""Read a call whose arguments are tagged values, such as `<parameter=KEY>VALUE</parameter>`.

A value may hold anything, markup of this very kind too.

Strategy
1. A value is first read with tags nested in it counted: a whole call quoted in a value is part of it.
2. When that comes to a contradiction (a tag closed that was not opened, or the end of the text), it is read again with
   every tag taken at its word, which is how a missing closing tag is found; twice at most.
3. A call ends with its closing tag, with what can only come after it (a wrapper's end, the next call, the token that
   ends a turn), or with the text, if every argument that the tool declares has been given: no more can be to come.

Invariants (tests): a half-written value is never executed; text is read again at most a fixed number of times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Set

from chat_tools.known_formats.grammar import Format, Tagged
from chat_tools.parsing.arguments import Schema, ToolSet, Written
from chat_tools.parsing.cursor import TOO_DENSE, Marks, Reader, Wait
from chat_tools.parsing.literals import dumps
from chat_tools.parsing.segments import Recorder

STRAY = "text between the arguments was left out"
WITHIN = "an argument's value holds the tag of another one"
NO_ARGUMENT = "the call's body is no argument"
_ARGUMENT_COST = 10
_TAG_COST = 3  # in a value
_HEADER = 200  # the longest name of a tag that is looked for inside values


class TaggedTables:
    """The compiled tags of one format."""

    def key(self, written: str) -> tuple[str, bool | None]:
        """Split the text in an argument's tag into its key and whether its value is declared to be text."""
        match = self.attribute.fullmatch(written) if self.attribute else None
        if match is None:
            return self.plain(written), None
        return self.plain(match["key"]), match["text"] == self.body.kinds[0]

    def name(self, written: str) -> str:
        """Return the name in a call's tag, without further attributes and quotes."""
        quoted = written.partition('"')[0] if self.attributes else written
        return self.plain(quoted.strip().strip("\"'"))

    def plain(self, written: str) -> str:
        """Return a name or key with its entities replaced."""
        return written.replace("&quot;", '"').replace("&amp;", "&") if self.body.entities else written

    def __init__(self, fmt: Format) -> None:
        body = fmt.body
        assert isinstance(body, Tagged)
        call = fmt.calls[0]
        self.body = body
        self.certain = body.key[0].startswith(("<|", "<｜"))  # such tags are quoted nowhere
        pairs = {"p": (body.key[0], body.value[1]), "f": call}
        if fmt.section:
            pairs["s"] = fmt.section
        self.outer = "s" if fmt.section else "f"
        self.close = {closing: kind for kind, (_, closing) in pairs.items()}
        self.open = {opening: kind for kind, (opening, _) in pairs.items()}
        name = rf"[^<>\n]{{1,{_HEADER}}}"
        opens = {
            body.key[0]: name + re.escape(body.key[1]),
            call[0]: "" if body.name_end == "\n" else name + re.escape(body.name_end),
        }
        marks = [*self.close, *self.open]
        self.in_value = Marks(
            re.compile(_value_pattern(self.close, {mark: opens.get(mark, "") for mark in self.open})),
            _HEADER + 2 * max(map(len, [*marks, body.key[1], body.name_end])),
            Marks.of(marks).first,
        )
        self.between = Marks.of([*(m for m in marks if m != body.value[1]), *fmt.ends])
        self.ends = frozenset(fmt.ends)
        kinds = "|".join(map(re.escape, body.kinds))
        said = rf'(?P<key>[^"]*+)"\s*+{re.escape(body.attribute)}\s*+=\s*+"?(?P<text>{kinds})"?'
        self.attribute = re.compile(said) if body.attribute else None
        self.attributes = call[0].endswith('"') and '"' not in body.name_end
        short = [body.short] if body.short else []
        self.name_stop = Marks.of([body.name_end, *short, "\n", *(marks if body.name_end[0] == "<" else "<")])
        self.raw_end = Marks.of([body.raw[1] + body.value[1]])
        self.key_stop = Marks.of([body.key[1], "\n", *(marks if body.key[1][0] == "<" else "<")])
        self.after_value = [m for m in marks if m != body.value[1]]
        self.after_call = [*(m for kind, pair in pairs.items() if kind != "p" for m in pair), *fmt.ends]


def _value_pattern(closes: Iterable[str], opens: Mapping[str, str]) -> str:
    """Return a pattern of closing markers (group "close") and of complete opening ones."""
    firsts = {mark[0] for mark in (*closes, *opens)}
    cut = 1 if len(firsts) == 1 else 0  # the same first character: it is looked for first, which is faster
    closing = "|".join(re.escape(mark[cut:]) for mark in closes)
    opening = "|".join(re.escape(mark[cut:]) + rest for mark, rest in opens.items())
    return f"{re.escape(min(firsts)) if cut else ''}(?:(?P<close>{closing})|{opening})"


def has_all(schema: Schema | None, given: Set[str]) -> bool:
    """Return whether these are all arguments that a tool declares, so that no more could follow."""
    properties = schema.get("properties") if schema is not None else None
    if not isinstance(properties, Mapping) or not properties or (schema or {}).get("additionalProperties"):
        return False
    return given == set(properties)


class TaggedReader:
    """A reader of one call, from after its opening marker."""

    __slots__ = ("always_flat", "flat", "notes", "pairs", "reader", "recorder", "tables", "tools")

    def __init__(self, reader: Reader, recorder: Recorder, tables: TaggedTables, tools: ToolSet) -> None:
        self.reader = reader
        self.recorder = recorder
        self.tables = tables
        self.tools = tools
        self.always_flat = False
        self.flat = False
        self.notes: list[str] = []
        self.pairs: list[Written] = []

    def read(self) -> Wait[str | None]:
        """Read to the end of the call and record it, or return why it is malformed at this position."""
        self.flat, self.notes, self.pairs = self.always_flat, [], []
        body = self.tables.body
        name = yield from self._header(self.tables.name_stop, body.name_end, body.short)
        if name is None:
            return "the tool's name is not closed"
        name = self.tables.name(name)
        if not name:
            return "the tool's name is empty"
        if body.short and self.reader.slice(self.reader.pos - len(body.short), self.reader.pos) == body.short:
            return self._record(name)
        properties = (self.tools.get(name) or {}).get("properties")
        while True:
            start = self.reader.pos
            match = yield from self.reader.search(self.tables.between)
            if match is not None and self.reader.slice(start, self.reader.pos).strip():
                self.notes.append(STRAY)
            if match is None:
                if self.reader.slice(start, self.reader.pos).strip() or not self._has_all(name):
                    return "the text ends inside the call"
                return self._record(name, "the call's closing tag is missing")
            mark = match.group()
            if mark in self.tables.ends:  # the model has ended its turn: no more arguments come
                return self._record(name, "the call's closing tag is missing")
            if self.tables.open.get(mark) == "p":
                reason = yield from self._parameter(properties if isinstance(properties, Mapping) else None)
                if reason:
                    return reason
                continue
            kind = self.tables.close.get(mark)
            if kind == "f":
                return self._record(name, closing=len(mark))
            if kind is None and not self.reader.at_line_start(self.reader.pos):
                self.reader.pos += len(mark)  # an opening marker within a line is text
                continue
            return self._record(name, "the call's closing tag is missing")

    def _record(self, name: str, note: str = "", closing: int = 0) -> str | None:
        """Record the call with the arguments read so far, or return why it is none: its body is no argument."""
        if STRAY in self.notes and not self.pairs:
            return NO_ARGUMENT
        if note:
            self.notes.append(note)
        self.reader.pos += closing
        arguments = dumps(self.tools.from_texts(name, self.pairs, self.notes, self.tables.body.guess))
        self.recorder.call(self.reader.pos, name, arguments, self.notes)
        return None

    def _has_all(self, name: str) -> bool:
        """Return whether every argument that the tool declares was read, so that no more could follow."""
        return has_all(self.tools.get(name), {key for key, *_ in self.pairs})

    def _header(self, stop: Marks, end: str, short: str = "") -> Wait[str | None]:
        """Read a name up to `end` or `short`; None if the line ends before, or another tag begins."""
        start = self.reader.pos
        match = yield from self.reader.search(stop)
        name = self.reader.slice(start, self.reader.pos).strip().strip("\"'")
        if match is not None and match.group() in (end, short):
            self.reader.pos += len(match.group())
            return name
        return name if end == "\n" and match is not None else None  # a line's end may be missing

    def _parameter(self, properties: Mapping[str, object] | None) -> Wait[str | None]:
        body = self.tables.body
        if not self.reader.charge(_ARGUMENT_COST):
            return TOO_DENSE
        self.reader.pos += len(body.key[0])
        start = self.reader.pos
        key = yield from self._header(self.tables.key_stop, body.key[1])
        if key is None:  # the tag itself is broken: at a line's end the line is the key
            key = self.reader.slice(start, self.reader.pos).strip().strip("\"'")
            if (yield from self.reader.at(["\n"])) != "\n":
                return "an argument's name is not closed"
            self.notes.append(f"the tag of argument {key!r} is not closed")
        key, is_text = self.tables.key(key)
        if not key:
            return "an argument's name is empty"
        if body.value[0]:
            yield from self.reader.space()
            if not (yield from self.reader.at([body.value[0]])):
                return f"argument {key!r} has no value"
            self.reader.pos += len(body.value[0])
        if body.raw[0] and (yield from self.reader.at([body.raw[0]])):
            return (yield from self._raw_value(key, None if key in (properties or {}) else True))
        begin = self.reader.pos
        end = None
        if not self.flat:
            end = yield from self._nested_value()
            if end is None:
                self.flat = True
                self.always_flat = self.always_flat or not self.reader.may_read_again()
                self.reader.move_back(begin)
        if end is None:
            end = yield from self._flat_value(properties)
        if end is None:
            return f"argument {key!r} is not closed"
        value = self.reader.slice(begin, end)
        if body.newlines:
            value = value.removeprefix("\n").removesuffix("\n")
        self.pairs.append((key, value, is_text))
        return None

    def _raw_value(self, key: str, is_text: bool | None) -> Wait[str | None]:
        """Read a value between the markers that keep it as it is; it is text where no type is declared."""
        body = self.tables.body
        begin = self.reader.pos + len(body.raw[0])
        if (yield from self.reader.search(self.tables.raw_end)) is None:
            return f"argument {key!r} is not closed"
        self.pairs.append((key, self.reader.slice(begin, self.reader.pos), is_text))
        self.reader.pos += len(body.raw[1] + body.value[1])
        return None

    def _nested_value(self) -> Wait[int | None]:
        """Find the end of a value, counting tags inside it; None on a contradiction."""
        reader, tables = self.reader, self.tables
        opened: list[str] = []
        while True:
            match = yield from reader.search(tables.in_value)
            if match is None or not reader.charge(_TAG_COST):
                return None
            mark, at = match.group(), reader.pos
            reader.pos += len(mark)
            if match.lastgroup != "close":
                opened.append(next(kind for opening, kind in tables.open.items() if mark.startswith(opening)))
                continue
            kind = tables.close[mark]
            if opened:
                if opened.pop() != kind:
                    return None
            elif (yield from self._plausible(kind)):
                return at if kind == "p" else None

    def _flat_value(self, properties: Mapping[str, object] | None) -> Wait[int | None]:
        """Find the end of a value without counting tags; None if it has none before the next call."""
        reader, tables = self.reader, self.tables
        while True:
            match = yield from reader.search(tables.in_value)
            if match is None or not reader.charge(_TAG_COST):
                return None
            mark, at = match.group(), reader.pos
            if match.lastgroup == "close":
                kind = tables.close[mark]
                reader.pos += len(mark)
                if kind == "p":
                    return at
                if kind != self.tables.outer and not (yield from self._plausible(kind)):
                    continue
            else:
                kind = next(kind for opening, kind in tables.open.items() if mark.startswith(opening))
                sure = tables.certain or reader.at_line_start(at)
                if not sure or (kind == "p" and not self._known(mark, properties)):
                    if kind == "p":
                        self.notes.append(WITHIN)
                    reader.pos += len(mark)
                    continue
                if kind != "p":
                    return None
            self.notes.append("an argument's closing tag is missing")
            reader.move_back(at)
            return at

    def _known(self, mark: str, properties: Mapping[str, object] | None) -> bool:
        key, (opening, closing) = mark, self.tables.body.key
        written = key.removeprefix(opening).removesuffix(closing).strip().strip("\"'")
        return not properties or self.tables.key(written)[0] in properties

    def _plausible(self, kind: str) -> Wait[bool]:
        """Return whether the text after a closing tag can follow it; move past white space only."""
        yield from self.reader.space()
        following = self.tables.after_value if kind == "p" else self.tables.after_call
        return (yield from self.reader.at(following)) != ""
