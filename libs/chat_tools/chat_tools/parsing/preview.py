"""What can be said of a call before it is complete: its name, and the arguments as far as they are certain.

Strategy
1. The parser settles a call when it is complete. Between two pieces of text the part that is not settled yet, from the
   recorder's cursor on, is read here as well, each character once. Nothing of it goes back into the parse.
2. Only the usual spelling is followed: a section's marker, a call's, a name, and then arguments one after another. At
   the first thing that could be read in two ways (a tag inside a value, a quote of another kind) the preview waits for
   the parser, so that what was said holds.
3. What is said are the arguments as JSON text in the parser's own spelling: a value that is complete as a whole, a
   string that the schema takes as it is while it comes.
4. When the parser has the call, the rest is said. A call that the parser refuses, or reads in another way (a key given
   twice), is dropped by an event of its own; in the second case it is told again as a new one.

Invariants (tests): a call that was started is finished or dropped; the deltas of a finished one are its arguments'
text; without a piece boundary inside a call nothing is read twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from chat_tools.parsing.arguments import ToolSet
from chat_tools.parsing.cursor import Reader
from chat_tools.parsing.grammar import Elements, Tagged
from chat_tools.parsing.literals import UNUSUAL, LiteralError, dumps, loads_plain
from chat_tools.parsing.preview_tables import PreviewTables
from chat_tools.parsing.result import ArgumentsDelta, CallDropped, CallFinished, CallStarted, Event, ToolCall

_LONGEST_HEADER = 600
_WORK_PER_CHARACTER, _SPARE_WORK = 3, 20_000  # past that, calls are told when they are complete
_SPACE = re.compile(r"\s*+")
_PLAIN = re.compile(r'[^"\\\x00-\x1f\ud800-\udfff]++')
_ESCAPE = re.compile(
    r'\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"  # a pair of surrogates is one character
)
_KEY = re.compile(r'"((?:[^"\\\x00-\x1f\ud800-\udfff])*+)"\s*+:\s*+(?=\S)')
_STRUCTURE = re.compile(r'["\[\]{},]')


class Preview:
    """Tell of the call that is coming, and of each that came. `tell` takes the events."""

    def __init__(self, tables: PreviewTables, tools: ToolSet, tell: Callable[[Event], None]) -> None:
        self.tables, self.tools, self.tell = tables, tools, tell
        self.count = 0
        self._work = 0
        self._reset(-1)

    def _reset(self, begin: int) -> None:
        self._begin = begin
        self._place = begin
        self._state = self._head
        self._name: str | None = None
        self._items: dict[str, Any] = {}
        self._key: str | None = None
        self._said = ""  # of the string under `_key`, decoded
        self._value = ""  # of a value that is not text, as it was written

    @property
    def started(self) -> bool:
        """Whether a call was told of that is not complete."""
        return self._name is not None

    def look(self, reader: Reader, begin: int) -> None:
        """Read what came since, of the text from `begin` on: the call that the parser is waiting in, if it is one."""
        if self.tables.head is None or begin >= reader.end:
            return
        if begin != self._begin:
            self._reset(begin)
        while self._state != self._stop and self._work <= _WORK_PER_CHARACTER * reader.end + _SPARE_WORK:
            state, text = self._state, reader.slice(self._place, reader.end)
            self._work += len(text) + 1
            taken = state(text) if text else 0
            self._place += taken
            if not taken and self._state == state:
                break

    def finish(self, call: ToolCall) -> None:
        """Say the rest of a call that is complete, or all of it."""
        rest = self._rest(call)
        if rest is None:
            self.drop("the call was read in another way")
        if self._name is None:
            self.tell(CallStarted(self.count, call.name, call.id))
            rest = call.arguments
        if rest:
            self.tell(ArgumentsDelta(self.count, rest))
        self.tell(CallFinished(call, self.count))
        self.count += 1
        self._reset(-1)

    def drop(self, reason: str) -> None:
        """Take back a call that was started and is none."""
        if self._name is not None:
            self.tell(CallDropped(self.count, reason))
            self.count += 1
        self._reset(-1)

    def forget(self) -> None:
        """Forget a call without a word: all that was said of it was held back."""
        self._reset(-1)

    def _rest(self, call: ToolCall) -> str | None:
        """What of the arguments' text was not said yet; None where it does not go on what was said."""
        if self._name is None:
            return ""
        values = call.arguments_dict()
        said = self._text(self._items, self._key, self._said)
        if call.name != self._name or not call.arguments.startswith(said):
            return None
        known = list(values.items())[: len(self._items)]
        return call.arguments[len(said) :] if known == list(self._items.items()) else None

    @staticmethod
    def _text(items: Mapping[str, Any], key: str | None, said: str) -> str:
        """The text that was said: the items, and the beginning of the string under `key`."""
        text = dumps(items)[:-1] if items else ""
        if key is not None and said:
            text += (", " if items else "{") + dumps(key) + ": " + dumps(said)[:-1]
        return text

    def _say(self, text: str) -> None:
        if text:
            self.tell(ArgumentsDelta(self.count, text))

    def _item(self, key: str, value: Any) -> None:
        """Say an argument that is complete."""
        self._say((", " if self._items else "{") + dumps(key) + ": " + dumps(value))
        self._items[key] = value

    def _string(self, text: str) -> None:
        """Say more of the string under `_key`."""
        assert self._key is not None
        if not self._said and text:
            self._say((", " if self._items else "{") + dumps(self._key) + ": " + dumps(text)[:-1])
        elif text:
            self._say(dumps(text)[1:-1])
        self._said += text

    def _string_ends(self) -> None:
        assert self._key is not None
        if self._said:
            self._say('"')
            self._items[self._key] = self._said
        else:
            self._item(self._key, "")
        self._key, self._said = None, ""

    # States: each takes the text from the place on and returns how many characters it has read; 0 waits for more.

    def _stop(self, text: str) -> int:
        """Wait for the parser."""
        del text
        return 0

    def _head(self, text: str) -> int:
        head, fmt = self.tables.head, self.tables.fmt
        assert head is not None
        match = head.match(text)
        if match is None:
            if len(text) > _LONGEST_HEADER:
                self._state = self._stop
            return 0
        name = (match["name"] or "").strip()
        if not name:
            self._state = self._stop
            return 0
        meant = self.tables.arguments is None or match["mark"] or self.tools.get(name) is not None
        if not meant and self.tables.arguments is not None and not self.tables.arguments.match(text, match.end()):
            return 0  # an object of the answer is a call only if it has arguments, or the name of a declared tool
        identifier = (match["id"] or "").strip() or None if "id" in head.groupindex else None
        self._name = name
        self.tell(CallStarted(self.count, name, identifier))
        schema = self.tools.get(name) or {}
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._extra = isinstance(schema.get("additionalProperties"), Mapping)
        if isinstance(fmt.body, Tagged | Elements):
            self._state = self._tag
        else:
            self._state = self._object if self.tables.arguments is None else self._between
        return match.end()

    def _is_text(self, key: str) -> bool:
        """Whether a string under this key is taken as it is, so that its beginning is certain."""
        if key not in self._properties:
            return not self._extra
        schema = self._properties[key]
        return isinstance(schema, Mapping) and schema.get("type") == "string" and not schema.keys() - _ANNOTATED

    def _tag(self, text: str) -> int:
        """Read the tag of an argument."""
        match = self.tables.key.match(text)
        value = self.tables.value.match(text, match.end()) if match else None
        body = self.tables.tagged
        if match is None or value is None or (body.newlines and len(text) == value.end()):
            if len(text) > _LONGEST_HEADER:
                self._state = self._stop
            return 0
        key = match["key"]
        if key in self._items:
            self._state = self._stop  # given twice: the last one counts
            return 0
        self._key, self._value = key, ""
        self._is_said = match["text"] == body.kinds[0] if body.attribute else None
        guessed = (body.guess or self._is_said is False) and key not in self._properties
        self._typed = not self._is_said and (guessed or not self._is_text(key))
        self._state = self._words
        end = value.end()
        return end + 1 if body.newlines and text[end] == "\n" else end

    def _words(self, text: str) -> int:
        """Read more of a value, up to the first thing that looks like a tag."""
        marks, body = self.tables.marks, self.tables.tagged
        match = marks.pattern.search(text)
        if match is None:
            sure = marks.begun(text, max(0, len(text) - marks.longest + 1))
            if body.newlines and sure and text[sure - 1] == "\n":
                sure -= 1  # it may belong to the closing tag
            self._more(text[:sure])
            return sure
        if not (end := self._closed(text, match)):
            return 0
        value = text[: match.start()]
        self._more(value.removesuffix("\n") if body.newlines else value)
        if self._typed and self.tables.prefix and not self._value.strip():
            self._state = self._stop  # nothing, an empty list or an empty object
            return 0
        if self._typed:
            key, self._key = self._key, None
            assert key is not None
            assert self._name is not None
            self._item(key, self.tools.from_texts(self._name, [(key, self._value, self._is_said)], [], body.guess)[key])
        else:
            self._string_ends()
        self._state = self._tag
        return end

    def _more(self, text: str) -> None:
        """Take more of a value: said at once if it is text, kept if it gets its type at its end."""
        if self._typed:
            self._value += text
        else:
            self._string(text)

    def _closed(self, text: str, match: re.Match[str]) -> int:
        """Where a closing tag ends, if it is one beyond doubt (an argument or the call's end follows); else 0."""
        if self.tables.prefix:
            return self._element_closed(text, match.start())
        if match.group() != self.tables.tagged.value[1]:
            self._state = self._stop
            return 0
        end = match.end()
        space = _SPACE.match(text, end)
        assert space is not None
        follows = text[space.end() :]
        if any(follows.startswith(mark) for mark in self.tables.follow if mark):
            return end
        if follows and not any(mark.startswith(follows) for mark in self.tables.follow):
            self._state = self._stop
        return 0

    def _element_closed(self, text: str, start: int) -> int:
        """Where an element's own closing tag ends, if it is what stands here; else 0."""
        closing = f"{self.tables.prefix}</{self._key}>"
        here = text[start : start + len(closing)]
        if not closing.startswith(here):
            self._state = self._stop
        return start + len(closing) if here == closing else 0

    def _between(self, text: str) -> int:
        """Read from the name to the object of arguments."""
        assert self.tables.arguments is not None
        match = self.tables.arguments.match(text)
        if match is None:
            if len(text) > 60:
                self._state = self._stop
            return 0
        self._state = self._object
        return match.end()

    def _object(self, text: str) -> int:
        assert text[0] == "{"
        self._state = self._json_key
        return 1

    def _json_key(self, text: str) -> int:
        """Read a comma, a key and its colon."""
        start = _SPACE.match(text)
        assert start is not None
        at = start.end()
        if at == len(text):
            return 0
        if self._items:
            if text[at] != ",":
                self._state = self._stop
                return 0
            at += 1
        space = _SPACE.match(text, at)
        assert space is not None
        match = _KEY.match(text, space.end())
        if match is None:
            if len(text) > _LONGEST_HEADER:
                self._state = self._stop
            return 0
        key = match.group(1)
        if key in self._items:
            self._state = self._stop
            return 0
        self._key = key
        if text[match.end()] == '"' and self._is_text(key):
            self._state = self._json_string
            return match.end() + 1
        self._depth, self._quoted, self._value = 0, False, ""
        self._state = self._json_value
        return match.end()

    def _json_string(self, text: str) -> int:
        """Read more of a string."""
        at, parts = 0, []
        while at < len(text):
            if plain := _PLAIN.match(text, at):
                parts.append(plain.group())
                at = plain.end()
            elif text[at] == '"':
                self._string("".join(parts))
                self._string_ends()
                self._state = self._json_key
                return at + 1
            elif escape := _ESCAPE.match(text, at):
                parts.append(json.loads(f'"{escape.group()}"'))
                at = escape.end()
            else:
                if text[at] != "\\" or len(text) - at > 12:
                    self._state = self._stop
                break
        self._string("".join(parts))
        return at

    def _json_value(self, text: str) -> int:
        """Read more of any other value, up to the comma or brace behind it."""
        at = 0
        while True:
            if self._quoted:
                plain = _PLAIN.match(text, at)
                at = plain.end() if plain else at
                if at >= len(text):
                    break
                if text[at] == "\\":
                    if at + 2 > len(text):
                        break
                    at += 2
                    continue
                if text[at] != '"':
                    self._state = self._stop
                    break
                self._quoted = False
                at += 1
                continue
            found = _STRUCTURE.search(text, at)
            if found is None:
                at = len(text)
                break
            mark = found.group()
            if mark in ",}]" and self._depth == 0:
                self._value += text[: found.start()]
                return found.start() if self._json_item(mark) else 0
            at = found.end()
            self._quoted = mark == '"'
            self._depth += (mark in "[{") - (mark in "]}")
        self._value += text[:at]
        return at

    def _json_item(self, mark: str) -> bool:
        """Say a value that is complete; False where it is not plain JSON."""
        key, self._key = self._key, None
        self._state = self._stop
        assert key is not None
        assert self._name is not None
        try:
            value = loads_plain(self._value) if mark != "]" else UNUSUAL
        except LiteralError:
            return False
        if value is UNUSUAL:
            return False
        values = {key: value}
        self.tools.check(self._name, values, [])
        self._item(key, values[key])
        self._state = self._json_key
        return True


_ANNOTATED = frozenset({"type", "description", "title", "default", "examples"})
