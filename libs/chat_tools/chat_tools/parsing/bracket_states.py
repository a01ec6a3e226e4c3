"""Stream the arguments of a call in brackets: a JSON object, Python's keywords, bare keys.

A string is decoded as it comes, where the schema takes it as it is; any other value is emitted at its end. Both end
where `find_end` (nested_json.py) has them end, and are read as the parser reads them (literals.py).
"""

from __future__ import annotations

import re
from typing import Any

from chat_tools.parsing.literals import FALLBACK, LiteralError, LiteralParser, loads_plain
from chat_tools.parsing.partial_values import PartialString, PartialValue
from chat_tools.parsing.preview_tables import Spelling
from chat_tools.parsing.streamed_call import ReaderStates, StreamedCall

_SPACE = re.compile(r"\s*+")


class BracketStates(ReaderStates):
    """States that read arguments from their opening bracket, or from the text between it and the name (`between`)."""

    def __init__(self, stream_call: StreamedCall, spelling: Spelling, between: re.Pattern[str] | None) -> None:
        super().__init__(stream_call)
        self.spelling, self.between = spelling, between
        self.state = self._open if between is None else self._lead
        self._key = ""
        self._string: PartialString | None = None
        self._value: PartialValue | None = None

    def _lead(self, text: str) -> int:
        """Read from the name to the object of arguments."""
        assert self.between is not None
        match = self.between.match(text)
        if match is None:
            return self.wait(text)
        self.state = self._open
        return match.end()

    def _open(self, text: str) -> int:
        assert text[0] == self.spelling.opening
        self.state = self._argument
        return 1

    def _argument(self, text: str) -> int:
        """Read a comma, a key, its separator from the value, and the quote of a string."""
        start = _space_end(text, 0)
        if start == len(text):
            return 0
        if self.stream_call.items:
            if text[start] != ",":
                self.state = self.stop
                return 0
            start += 1
        match = self.spelling.key.match(text, _space_end(text, start))
        if match is None:
            return self.wait(text)
        key, begin = match["key"], match.end()
        if key in self.stream_call.items:
            self.state = self.stop  # given twice: the last one counts
            return 0
        here = text[begin : begin + self.spelling.longest_quote]
        if any(len(here) < len(quote) and quote.startswith(here) for quote in self.spelling.quotes):
            return 0  # which quote it is shows in the next character
        self._key = key
        quote = next((quote for quote in self.spelling.quotes if here.startswith(quote)), "")
        if quote and self.stream_call.may_be_text(key):
            self.stream_call.begin_string(key)
            self._string = PartialString(quote, quote in self.spelling.raw)
            self.state = self._text
            return begin + len(quote)
        self._value = PartialValue(self.spelling.quotes, self.spelling.raw)
        self.state = self._other
        return begin

    def _text(self, text: str) -> int:
        """Read more of a string."""
        string = self._string
        assert string is not None
        read, said = string.read(text)
        self.stream_call.string(said)
        if string.ended:
            self.stream_call.end_string()
            self.state = self._argument
        elif string.lost:
            self.state = self.stop
        return read

    def _other(self, text: str) -> int:
        """Read more of a value that is no string, up to the comma or bracket after it."""
        value = self._value
        assert value is not None
        read = value.read(text)
        if value.ended:
            self.state = self.stop
            meant = self._meaning(value.text)
            if meant is not FALLBACK:
                self.stream_call.checked_item(self._key, meant)
                self.state = self._argument
        return read

    def _meaning(self, text: str) -> Any:
        """Return the value of the text; FALLBACK where it is not certain."""
        try:
            if self.spelling.is_json:
                return loads_plain(text)
            spelling = self.spelling
            return LiteralParser(text, [], quotes=spelling.raw, bare_keys=spelling.bare_keys).whole()
        except LiteralError:
            return FALLBACK


def _space_end(text: str, start: int) -> int:
    """Return the end of the white space that begins at `start`."""
    space = _SPACE.match(text, start)
    assert space is not None
    return space.end()
