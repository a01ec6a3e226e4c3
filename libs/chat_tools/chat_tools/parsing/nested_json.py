"""Find the end of a bracketed value, as its text comes: brackets are counted, strings skipped, nothing is built.

Strategy
1. One possessive pattern skips, at one go, plain characters, whole strings behind which something follows that may,
   and brackets nested twice at most: most values are passed in one step.
2. What stops it is looked at alone: a bracket goes on the stack or comes off, a quote opens a string whose end may not
   be here yet, a marker of the format outside of a string ends the value unfinished.
3. A quote or marker that the end of the window cuts off waits for more text; nothing before it is read again.

Invariants (tests): the verdict does not depend on how the text was cut; the work is linear in the text; a string holds
any marker; depth is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from chat_tools.parsing.cursor import Reader, Wait
from chat_tools.parsing.literals import MAX_DEPTH

_PAIRS = {"{": "}", "[": "]", "(": ")"}


class Brackets:
    """The compiled brackets of one format.

    `stops` are the format's markers: outside a string they end the value unfinished. `quotes` are string delimiters
    without escapes, beside " and '; `triple` adds Python's tripled ones.
    """

    def __init__(self, stops: Iterable[str], quotes: Iterable[str] = (), triple: bool = False) -> None:
        self.stops = tuple(stops)
        self.plain_quotes = tuple(quotes)
        self.quotes = (*self.plain_quotes, *(('"""', "'''") if triple else ()), '"', "'")
        self.inside = {q: string_inside(q, q in self.plain_quotes) for q in self.quotes}
        self.longest = max(map(len, [*self.stops, *self.quotes]))
        atoms = self._atoms()
        small = "|".join(rf"{re.escape(a)}(?:{atoms})*+{re.escape(b)}" for a, b in _PAIRS.items())
        small = "|".join(rf"{re.escape(a)}(?:{atoms}|{small})*+{re.escape(b)}" for a, b in _PAIRS.items())
        self.skip = re.compile(rf"(?:{atoms}|{small})*+")
        self.skip_flat = re.compile(rf"(?:{atoms})*+")

    def _atoms(self) -> str:
        """Return a pattern of plain characters, and of whole strings with an allowed character after them."""
        marks = [*self.stops, *self.plain_quotes]
        firsts = "".join(map(re.escape, sorted({mark[0] for mark in marks} - {"["})))
        atoms = [rf"[^\[\]{{}}()\"'{firsts}]++"]
        for first in sorted({mark[0] for mark in marks} - {"["}):  # the beginning of a marker that is none
            rest = "|".join(re.escape(mark[1:]) for mark in marks if mark[0] == first)
            atoms.append(rf"{re.escape(first)}(?!{rest})(?=[\s\S]{{{self.longest}}})")
        strings = [(re.escape(q), self.inside[q].pattern) for q in (*self.plain_quotes, '"', "'")]
        atoms += [quote + inside + quote + _FOLLOWS for quote, inside in strings]
        return "|".join(atoms)


@cache
def string_inside(quote: str, raw: bool) -> re.Pattern[str]:
    """Return a pattern of a string's inside, up to its possible end; `raw` strings have no escapes."""
    first, rest = quote[0], quote[1:]
    escape = "" if raw else "\\\\"
    parts = [rf"[^{first}{escape}]++", *([] if raw else [r"\\[\s\S]"])]
    if rest:
        parts.append(rf"{first}(?!{re.escape(rest)})(?=[\s\S]{{{len(rest)}}})")
    return re.compile(f"(?:{'|'.join(parts)})*+")


class _State:
    """The state of reading brackets."""

    __slots__ = ("after_string", "pos", "quote", "stack")

    def __init__(self, opening: str) -> None:
        self.stack = [_PAIRS[opening]]
        self.quote = ""
        self.after_string = False
        self.pos = 0


def find_end(reader: Reader, brackets: Brackets) -> Wait[str]:
    """Move from an opening bracket past its closing one and return "", or to the break and return its reason."""
    begin = reader.pos
    state = _State(reader.window[begin - reader.base])
    reader.pos += 1
    while True:
        state.pos = start = reader.pos - reader.base
        verdict = _advance(reader.window, state, brackets, reader.final)
        reader.operations += state.pos - start
        reader.pos = reader.base + state.pos
        if verdict is not None:
            if verdict:
                reader.charged += (reader.pos - begin) // 4
            return verdict
        yield


def _advance(window: str, state: _State, brackets: Brackets, final: bool) -> str | None:
    """Read the available text; return the verdict, or None if more text is needed."""
    end, stack, pairs = len(window), state.stack, _PAIRS
    while True:
        if state.quote and not _skip_string(window, state, brackets, final):
            return "a string is not closed" if final else None
        if state.after_string:
            following = _NOT_SPACE.search(window, state.pos)
            state.pos = following.start() if following else end
            if following is None:
                return "the text ends inside the call" if final else None
            if window[state.pos] not in ",:}])":
                return "a string is followed by other text"
            state.after_string = False
        # What is skipped at one go may have two levels of brackets, which count for the depth too.
        skip = brackets.skip if len(stack) < MAX_DEPTH - 1 else brackets.skip_flat
        run = skip.match(window, state.pos)
        assert run is not None
        pos = state.pos = run.end()
        if pos == end:
            return "the text ends inside the call" if final else None
        character = window[pos]
        if character in pairs:
            stack.append(pairs[character])
            if len(stack) > MAX_DEPTH:
                return f"nested deeper than {MAX_DEPTH}"
            state.pos += 1
        elif character in "]})":
            if stack.pop() != character:
                return "brackets do not match"
            state.pos += 1
            if not stack:
                return ""
        elif end - pos < brackets.longest and not final and _undecided(window, pos, brackets):
            return None
        elif window.startswith(brackets.stops, pos):
            return "a marker stands inside the arguments"
        else:
            state.quote = next((q for q in brackets.quotes if window.startswith(q, pos)), "")
            state.pos += len(state.quote) or 1


def _undecided(window: str, pos: int, brackets: Brackets) -> bool:
    """Return whether the text at the window's end may become a longer marker."""
    rest = window[pos:]
    return any(len(rest) < len(m) and m.startswith(rest) for m in (*brackets.stops, *brackets.quotes))


def _skip_string(window: str, state: _State, brackets: Brackets, final: bool) -> bool:
    """Move past the open string; return False if its end has not come yet."""
    run = brackets.inside[state.quote].match(window, state.pos)
    assert run is not None
    state.pos = run.end()
    if window.startswith(state.quote, state.pos):
        state.pos += len(state.quote)
        state.quote, state.after_string = "", True
        return True
    if final:
        state.pos = len(window)
    return False


_NOT_SPACE = re.compile(r"\S")
_FOLLOWS = r"(?=\s*+[,:}\])])"
