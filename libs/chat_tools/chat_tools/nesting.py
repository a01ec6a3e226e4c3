"""Find where a bracketed value ends, as its text comes: brackets counted, strings skipped, nothing built."""

from __future__ import annotations

import re
from collections.abc import Iterable

from chat_tools.literals import MAX_DEPTH
from chat_tools.reader import Reader, Wait

_PAIRS = {"{": "}", "[": "]", "(": ")"}


class Brackets:
    """What the brackets of one format compile to.

    `stops` are the format's markers: outside a string they end the value unfinished. `quotes` are string delimiters
    without escapes, beside " and '; `triple` adds Python's tripled ones.
    """

    def __init__(self, stops: Iterable[str], quotes: Iterable[str] = (), triple: bool = False) -> None:
        self.stops = tuple(stops)
        self.plain_quotes = tuple(quotes)
        self.quotes = (*self.plain_quotes, *(('"""', "'''") if triple else ()), '"', "'")
        special = re.escape("".join(sorted({s[0] for s in (*self.stops, *self.plain_quotes)})))
        if special.startswith("^"):
            special = "\\" + special
        # At one go: plain characters, and whole strings that something follows.
        strings = "" if triple else r'|"(?:[^"\\]++|\\[\s\S])*+"(?=\s*[,:}\])])'
        self.skip = re.compile(rf"(?:[^\[\]{{}}()\"'{special}]++{strings})*+")
        self.inside = {q: re.compile(re.escape(q) if q in self.plain_quotes else rf"\\[\s\S]|{q}") for q in self.quotes}
        self.longest = max(map(len, [*self.stops, *self.quotes]))


class _State:
    """How far the brackets are read."""

    __slots__ = ("after_string", "pos", "quote", "stack")

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.quote = ""
        self.after_string = False
        self.pos = 0


def find_end(reader: Reader, brackets: Brackets) -> Wait[str]:
    """Move from an opening bracket to behind its closing one and return ""; or to where it broke, with the reason."""
    state = _State()
    while True:
        state.pos = start = reader.pos - reader.base
        verdict = _advance(reader.window, state, brackets, reader.final)
        reader.operations += state.pos - start
        reader.pos = reader.base + state.pos
        if verdict is not None:
            return verdict
        yield


def _advance(window: str, state: _State, brackets: Brackets, final: bool) -> str | None:
    """Read what there is; return the verdict, or None if more text is needed."""
    end = len(window)
    skip, stack = brackets.skip.match, state.stack
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
        run = skip(window, state.pos)
        assert run is not None
        pos = state.pos = run.end()
        if pos == end:
            return "the text ends inside the call" if final else None
        character = window[pos]
        if character in _PAIRS:
            stack.append(_PAIRS[character])
            if len(stack) > MAX_DEPTH:
                return f"nested deeper than {MAX_DEPTH}"
            state.pos += 1
        elif character in "]})":
            if not stack or stack.pop() != character:
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
    """Say whether what begins here, at the window's end, may yet become a longer marker."""
    rest = window[pos:]
    return any(len(rest) < len(m) and m.startswith(rest) for m in (*brackets.stops, *brackets.quotes))


def _skip_string(window: str, state: _State, brackets: Brackets, final: bool) -> bool:
    """Move behind the open string; False if its end is not here yet."""
    pattern = brackets.inside[state.quote]
    while match := pattern.search(window, state.pos):
        state.pos = match.end()
        if match.group()[0] != "\\":
            state.quote, state.after_string = "", True
            return True
    end = len(window)
    if final:
        state.pos = end
    elif state.pos < end:  # keep what may be the beginning of an escape or of the delimiter
        keep = 1 if window.endswith("\\") else 0
        state.pos = max(state.pos, end - max(keep, len(state.quote) - 1))
    return False


_NOT_SPACE = re.compile(r"\S")
