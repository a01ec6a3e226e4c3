"""Stream the arguments of a tagged call: a value ends at its closing tag, if it certainly is one."""

from __future__ import annotations

import re

from chat_tools.parsing.literals import is_no_value
from chat_tools.parsing.preview_tables import PreviewTables
from chat_tools.parsing.streamed_call import ReaderStates, StreamedCall

_LONGEST_DOUBT = 64  # characters after which what may still be a number or JSON is taken for it
_SPACE = re.compile(r"\s*+")


class TagStates(ReaderStates):
    """States that read arguments as tags or elements, from after the call's name."""

    def __init__(self, stream_call: StreamedCall, tables: PreviewTables) -> None:
        super().__init__(stream_call)
        self.tables = tables
        self.state = self._tag
        self._key = ""
        self._typed = False  # whether the value gets its type at its end, or when it is known to be no JSON
        self._may_be_text = False
        self._value: list[str] = []  # of a typed value, as it was written
        self._is_said: bool | None = None  # whether the model says that the value is text
        self._keeps = False  # whether the value stands between the pair that keeps it as it is

    def _tag(self, text: str) -> int:
        """Read the tag of an argument."""
        match = self.tables.key.match(text)
        value = self.tables.value.match(text, match.end()) if match else None
        body = self.tables.tagged
        if match is None or value is None or (body.newlines and len(text) == value.end()):
            return self.wait(text)
        key = match["key"]
        here, keeps = text[value.end() :], body.raw[0]
        if keeps and keeps.startswith(here):
            return 0  # whether the value stands between the pair that keeps it shows in the next characters
        if key in self.stream_call.items:
            self.state = self.stop  # given twice: the last one counts
            return 0
        self._keeps = bool(keeps) and here.startswith(keeps)
        self._key, self._value = key, []
        self._is_said = match["text"] == body.kinds[0] if body.attribute else None
        if self._keeps and not self.stream_call.is_declared(key):
            self._is_said = True
        guessed = (body.guess or self._is_said is False) and not self.stream_call.is_declared(key)
        self._typed = not self._is_said and (guessed or not self.stream_call.is_text(key))
        self._may_be_text = self.stream_call.may_be_text(key)
        if not self._typed:
            self.stream_call.begin_string(key)
        self.state = self._words
        end = value.end() + len(keeps) * self._keeps
        return end + 1 if body.newlines and text[end] == "\n" else end

    def _words(self, text: str) -> int:
        """Read more of a value, up to the first thing that looks like a tag."""
        body = self.tables.tagged
        marks = self.tables.kept_end if self._keeps else self.tables.marks
        match = marks.pattern.search(text)
        if match is None:
            sure = marks.partial_match(text, max(0, len(text) - marks.longest + 1))
            if body.newlines and sure and text[sure - 1] == "\n":
                sure -= 1  # it may belong to the closing tag
            self._more(text[:sure])
            return sure
        if not (end := self._closed(text, match)):
            return 0
        value = text[: match.start()]
        self._more(value.removesuffix("\n") if body.newlines else value)
        written = "".join(self._value)
        if self._typed and self.tables.prefix and not written.strip():
            self.state = self.stop  # nothing, an empty list or an empty object
            return 0
        if self._typed:
            call = self.stream_call
            assert call.name is not None
            values = call.tools.from_texts(call.name, [(self._key, written, self._is_said)], [], body.guess)
            call.item(self._key, values[self._key])
        else:
            self.stream_call.end_string()
        self.state = self._tag
        return end

    def _more(self, text: str) -> None:
        """Read more of a value: emitted at once if it is text, else kept until its end."""
        if not self._typed:
            self.stream_call.string(text)
            return
        self._value.append(text)
        if not self._may_be_text:
            return
        value = "".join(self._value)
        self._may_be_text = len(value) < _LONGEST_DOUBT
        if is_no_value(value):
            self._typed = False
            self.stream_call.begin_string(self._key)
            self.stream_call.string(value)

    def _closed(self, text: str, match: re.Match[str]) -> int:
        """Return the end of a closing tag, if it certainly is one (an argument or the call's end follows); else 0."""
        if self.tables.prefix:
            return self._element_closed(text, match.start())
        if not match.group().endswith(self.tables.tagged.value[1]):
            self.state = self.stop
            return 0
        end = match.end()
        space = _SPACE.match(text, end)
        assert space is not None
        follows = text[space.end() :]
        if any(follows.startswith(mark) for mark in self.tables.follow if mark):
            return end
        if follows and not any(mark.startswith(follows) for mark in self.tables.follow):
            self.state = self.stop
        return 0

    def _element_closed(self, text: str, start: int) -> int:
        """Return the end of the element's own closing tag, if it is here; else 0."""
        closing = f"{self.tables.prefix}</{self._key}>"
        here = text[start : start + len(closing)]
        if not closing.startswith(here):
            self.state = self.stop
        return start + len(closing) if here == closing else 0
