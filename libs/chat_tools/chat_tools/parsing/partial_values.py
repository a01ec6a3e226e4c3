"""Values whose end is not here yet: a string decoded piece by piece, anything else up to its own end.

Invariants (tests): whatever the pieces, a string's text is what `decode_escapes` makes of the whole; a value ends at
the same character.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from chat_tools.parsing.literals import ESCAPE, decode_escapes
from chat_tools.parsing.nested_json import string_inside

_SURROGATE = re.compile("[\ud800-\udfff]")
_CUT = re.compile(  # an escape that the text's end cuts off; a pair of surrogates is one
    r"\\(?:\r|u[0-9a-fA-F]{0,3}|x[0-9a-fA-F]?|U[0-9a-fA-F]{0,7}"
    r"|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?)?)?)?"
)


class PartialString:
    """A string behind its opening quote. Between `raw` quotes there are no escapes.

    `ended` after its closing quote; `lost` before a lone surrogate, with which all of the text is spelled anew.
    """

    def __init__(self, quote: str, raw: bool) -> None:
        self.quote, self.raw = quote, raw
        self.ended = self.lost = False
        self._plain = _plain(quote[0], raw)

    def read(self, text: str) -> tuple[int, str]:
        """Return the number of characters of `text` that were read, and their meaning; the rest waits for more."""
        quote, at, parts = self.quote, 0, []
        while at < len(text):
            if run := self._plain.match(text, at):
                parts.append(run.group())
                at = run.end()
            elif text[at] == quote[0]:
                here = text[at : at + len(quote)]
                if here == quote:
                    self.ended = True
                    at += len(quote)
                    break
                if quote.startswith(here):  # cut off
                    break
                parts.append(quote[0])
                at += 1
            else:
                escape = None if _CUT.fullmatch(text, at) else ESCAPE.match(text, at)
                meant = decode_escapes(escape.group()) if escape else ""
                self.lost = bool(_SURROGATE.search(meant)) or text[at] != "\\"
                if escape is None or self.lost:
                    break
                parts.append(meant)
                at = escape.end()
        return at, "".join(parts)


class PartialValue:
    """A value that is no string, or one whose type is open. `ended` before the comma or bracket behind it."""

    def __init__(self, quotes: Sequence[str], raw: Sequence[str]) -> None:
        self.quotes = quotes
        self.ended = False
        self._verbatim = raw
        self._structure = _structure(tuple(quotes))
        self._parts: list[str] = []
        self._depth = 0
        self._quote = ""

    @property
    def text(self) -> str:
        """The text of the value so far, as it is written."""
        return "".join(self._parts)

    def read(self, text: str) -> int:
        """Return the number of characters of `text` that are the value's; the rest waits for more, or follows it."""
        at = 0
        while at < len(text):
            if self._quote:
                inside = string_inside(self._quote, self._quote in self._verbatim).match(text, at)
                at = inside.end() if inside else at
                if not text.startswith(self._quote, at):
                    break
                at += len(self._quote)
                self._quote = ""
                continue
            match = self._structure.search(text, at)
            at = match.start() if match else len(text)
            if match is None:
                break
            mark = match.group()
            if mark in ",)]}" and self._depth == 0:
                self.ended = True
                break
            if mark in ",()[]{}":
                self._depth += (mark in "([{") - (mark in ")]}")
                at += 1
                continue
            here = text[at : at + max(map(len, self.quotes))]
            if any(len(here) < len(quote) and quote.startswith(here) for quote in self.quotes):
                break
            self._quote = next((quote for quote in self.quotes if here.startswith(quote)), "")
            at += len(self._quote) or 1
        self._parts.append(text[:at])
        return at


@cache
def _plain(first: str, raw: bool) -> re.Pattern[str]:
    """Return a pattern of the characters in a string that mean themselves."""
    escape = "" if raw else r"\\"
    return re.compile(rf"[^{re.escape(first)}{escape}\ud800-\udfff]++")


@cache
def _structure(quotes: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of a bracket, a comma, or the first character of a quote."""
    firsts = "".join(sorted({re.escape(quote[0]) for quote in quotes}))
    return re.compile(rf"[\[\]{{}}(),{firsts}]")
