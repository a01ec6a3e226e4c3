"""A text that grows, read by coroutines: each `yield` means "I need more text"."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Generator, Iterable, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Wait = Generator[None, None, T]

# Rereading (a value read as nested that turns out not to be) may cost this many times the text read so far, then it is
# refused; this alone makes every parse linear.
READ_AGAIN_FACTOR = 2

# The scan budget. What is looked at is charged, in units of about a microsecond of a slow core. A text may cost
# SCAN_BUDGET, and one more for every CHARACTERS_PER_UNIT read; past that, text is passed over unread until enough has
# gone by. This bounds a megabyte of nothing but markers. It depends on the text alone, not on how it was cut.
SCAN_BUDGET = 80_000
CHARACTERS_PER_UNIT = 12
MARKER_COST = 5
CALL_COST = 25
# However much was looked at for one call: a bad one takes no good one with it.
MAX_CALL_COST = 40_000
TOO_DENSE = "too many markers and calls in too little text"


class Marks(NamedTuple):
    """A search pattern, the length of its longest match, and the characters with which a match can begin.

    `literals` are all that can match, or empty where the pattern is more than a list of them.
    """

    pattern: re.Pattern[str]
    longest: int
    first: re.Pattern[str]
    literals: tuple[str, ...] = ()

    @classmethod
    def of(cls, literals: Iterable[str]) -> Marks:
        """Compile literals."""
        known = sorted({literal for literal in literals if literal}, key=len, reverse=True)
        pairs = ((a, b) for a in known for b in known if a != b)
        if any(b.startswith(a) for a, b in pairs):
            raise ValueError(f"a marker must not begin with another one: {known}")
        first = "".join(sorted({re.escape(literal[0]) for literal in known}))
        rest = [re.escape(literal[1:]) for literal in known]
        same = len({literal[0] for literal in known}) == 1  # then that character is looked for, which is faster
        pattern = f"{re.escape(known[0][0])}(?:{'|'.join(rest)})" if same else "|".join(map(re.escape, known))
        return cls(re.compile(pattern), max(map(len, known)), re.compile(f"[{first}]"), tuple(known))

    def partial_match(self, window: str, start: int) -> int:
        """Return the position, from `start` on, of a possible match that the window's end cuts off."""
        while match := self.first.search(window, start):
            start = match.start()
            if not self.literals or any(literal.startswith(window[start:]) for literal in self.literals):
                return start
            start += 1
        return len(window)


class Reader:
    """A growing text with a position, in characters from its beginning. `operations` counts the characters examined."""

    __slots__ = ("_store", "base", "charged", "end", "final", "operations", "pos", "read_again", "window")

    def __init__(self) -> None:
        self.pos = 0
        self.end = 0
        self.final = False
        self.operations = 0
        self.read_again = 0
        self.charged = 0
        self._store: io.StringIO | None = None  # made when a second piece comes
        self.window = ""
        self.base = 0

    def append(self, text: str) -> None:
        """Add text at the end, in time of the new text and the few characters not consumed yet."""
        if self._store is not None:
            self._store.write(text)
        elif self.end == 0:
            self.window, self.end = text, len(text)
            self.operations += self.end
            return
        elif text:
            self._store = io.StringIO(newline="")
            self._store.write(self.window)  # the first piece is whole as long as there is no second
            self._store.write(text)
        else:
            return
        self.window = self.window[self.pos - self.base :] + text
        self.base = self.pos
        self.end += len(text)
        self.operations += len(self.window)

    def slice(self, start: int, end: int) -> str:
        """Return the characters `start:end`."""
        self.operations += end - start
        base = self.base
        if start >= base:
            return self.window[start - base : end - base]
        assert self._store is not None
        self._store.seek(start)
        text = self._store.read(end - start)
        self._store.seek(0, io.SEEK_END)
        return text

    def text(self) -> str:
        """Return all of the text."""
        return self.window if self._store is None else self._store.getvalue()

    def move_back(self, pos: int) -> None:
        """Move back to `pos`."""
        self.read_again += self.pos - pos
        if pos < self.base:
            window = self.slice(pos, self.end)
            self.window, self.base = window, pos
        self.pos = pos

    def may_read_again(self) -> bool:
        """Return whether the budget for rereading is left; it depends on the text alone, not on its pieces."""
        return self.read_again <= READ_AGAIN_FACTOR * self.pos

    def charge(self, units: int) -> bool:
        """Charge for characters to be examined; return False, and charge nothing, where the budget is used up."""
        if self.charged > SCAN_BUDGET + self.pos // CHARACTERS_PER_UNIT:
            return False
        self.charged += units
        return True

    def cap_call(self, before: int) -> None:
        """Cap the cost of a call, which began when `before` had been charged, at MAX_CALL_COST."""
        self.charged = min(self.charged, before + MAX_CALL_COST)

    def allowed_from(self) -> int:
        """Return the position from which the budget allows more."""
        return (self.charged - SCAN_BUDGET) * CHARACTERS_PER_UNIT

    def step(self, marks: Marks) -> re.Match[str] | None:
        """Move to the next mark and return it; without one, move past the text that cannot be part of one."""
        match = marks.pattern.search(self.window, self.pos - self.base)
        if match is not None:
            start, end = match.span()
            self.operations += self.base + end - self.pos
            self.pos = self.base + start
            return match
        self.operations += self.end - self.pos
        tail = self.end if self.final else max(self.pos, self.end - marks.longest + 1)  # a mark may have begun here
        self.pos = self.base + marks.partial_match(self.window, tail - self.base)
        return None

    def search(self, marks: Marks) -> Wait[re.Match[str] | None]:
        """Move to the next mark, or to the end of the text (None)."""
        while (match := self.step(marks)) is None and not self.final:
            yield
        return match

    def space(self) -> Wait[None]:
        """Skip white space."""
        yield from self.next()

    def next(self) -> Wait[str]:
        """Skip white space and return the character that follows, "" at the end of the text."""
        while not (character := self.peek()):
            self.operations += self.end - self.pos
            self.pos = self.end
            if self.final:
                return ""
            yield
        return character

    def peek(self) -> str:
        """Skip white space and return the character that follows, "" if it is not here yet."""
        match = _NOT_SPACE.search(self.window, self.pos - self.base)
        if match is None:
            return ""
        start = self.base + match.start()
        self.operations += start - self.pos + 1
        self.pos = start
        return match.group()

    def at(self, literals: Sequence[str]) -> Wait[str | None]:
        """Return the literal at the position, "" for none, None at the end of the text. The position stays."""
        while True:
            start = self.pos - self.base
            for literal in literals:
                if self.window.startswith(literal, start):
                    self.operations += len(literal)
                    return literal
            if self.final:
                return "" if self.pos < self.end else None
            here = self.window[start : start + 256]
            if here and not any(literal.startswith(here) for literal in literals):
                self.operations += 1
                return ""
            yield

    def need(self, count: int) -> Wait[str]:
        """Return the next `count` characters, fewer only at the end of the text. The position stays."""
        while self.end - self.pos < count and not self.final:
            yield
        start = self.pos - self.base
        return self.window[start : start + count]

    def at_line_start(self, pos: int) -> bool:
        """Return whether `pos` is the first position of a line."""
        if pos > self.base:
            return self.window[pos - self.base - 1] == "\n"
        return pos == 0 or self.slice(pos - 1, pos) == "\n"


class TextDecoder:
    """Text that comes as text, or as UTF-8 cut anywhere."""

    def __init__(self) -> None:
        self._decoder: codecs.IncrementalDecoder | None = None  # made when bytes come

    def feed(self, text: str | bytes) -> str:
        """Return the text that more of it makes certain."""
        if isinstance(text, bytes):
            self._decoder = self._decoder or codecs.getincrementaldecoder("utf-8")("replace")
            return self._decoder.decode(text)
        return self.finish() + text

    def finish(self) -> str:
        """Return what stands for a character that is cut off."""
        decoder, self._decoder = self._decoder, None
        return "" if decoder is None else decoder.decode(b"", True)


NAME_END = Marks(re.compile(r"[^\w.\-]"), 1, re.compile(r"[^\w.\-]"))
_NOT_SPACE = re.compile(r"\S")
