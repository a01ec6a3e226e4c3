"""Marks around the texts of messages: private-use characters that a rendering carries to where each text is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from chat_tools.rendering.replaced_messages import REASONING_KEYS
from chat_tools.rendering.template import Message

_REASONING = frozenset(REASONING_KEYS)
_PRIVATE = 0xF0000  # planes 15 and 16: no script has characters there
PRIVATE_CHARACTER = re.compile("[\U000f0000-\U0010ffff]")
# Such characters as Python prints them in a dict, and as JSON in ASCII.
_ESCAPED = re.compile(r"\\U(000f[0-9a-f]{4})|\\u(db[89ab][0-9a-f])\\u(d[c-f][0-9a-f]{2})")
_ESCAPES = ("\\U000f", "\\udb8")  # how they begin
# What a template compares a text with, or cuts it at: marks must not stand inside or before it.
_CUTS = re.compile(r"""(?:split|startswith|endswith|replace)\(\s*(['"])(.+?)\1|(['"])([^'"\n]+)\3\s+(?:not\s+)?in\s""")
Wrap = Callable[[str], str]


class Place(NamedTuple):
    """The place of a text: in a message (or its reasoning), or (unless None) in a call, as its name or arguments."""

    message: int
    call: int | None = None
    is_name: bool = False
    is_reasoning: bool = False


class Marks:
    """The marks of one rendering: their characters, and the places where a text may be cut."""

    def __init__(self, source: str, text: str, messages: Sequence[Message]) -> None:
        taken = set(PRIVATE_CHARACTER.findall(text))
        self.table: list[Place] = []  # what each opening mark stands for
        self.written: list[int] = []  # how many segments have it
        self.messages = messages
        self.escaped: set[int] = set()  # messages whose words were found in an escaped form
        # of each message: a mark for its words, one for its reasoning, and two for each of its calls
        count = 1 + sum(1 + thinks(message) + 2 * len(calls_of(message)) for message in messages)
        self.base = _PRIVATE
        while any(self.base <= ord(character) < self.base + count for character in taken):
            self.base += count
        self.close = chr(self.base + count - 1)
        self.pattern = re.compile(f"([{chr(self.base)}-{self.close}])")
        self.cut, self.cuts, _ = cut_patterns(source)

    def wrap(self, place: Place) -> Wrap:
        """Return the function that marks the segments of a text with a new mark for the place."""
        opening = chr(self.base + len(self.table))
        number = len(self.table)
        self.table.append(place)
        self.written.append(0)
        is_cut, close, written = self.cut.search, self.close, self.written

        def wrapped(text: str) -> str:
            if is_cut(text) is not None:
                marked = self._in_segments(opening, text)
                written[number] += marked.count(close)
                return marked
            if not text or text.isspace():
                return text
            written[number] += 1
            return opening + text + close if text == text.strip() else self._segment(opening, text)

        return wrapped

    def _in_segments(self, opening: str, text: str) -> str:
        parts, last = [], 0
        for cut in self.cuts.finditer(text):
            parts += [self._segment(opening, text[last : cut.start()]), cut.group()]
            last = cut.end()
        return "".join([*parts, self._segment(opening, text[last:])])

    def _segment(self, opening: str, text: str) -> str:
        core = text.strip()
        if core == text:
            return f"{opening}{core}{self.close}" if core else ""
        at = text.index(core)
        return f"{text[:at]}{opening}{core}{self.close}{text[at + len(core) :]}" if core else text

    def wrap_call(self, message: int, is_name: bool, call: int) -> Wrap:
        """Return the function that marks the name or the arguments of a call."""
        return self.wrap(Place(message, call, is_name))

    def read(self, rendered: str) -> tuple[str, list[tuple[int, int, Place]]] | None:
        """Return the text without marks and (start, end, place) of its marked segments; None if one was cut in two.

        Marks may be written as JSON or Python escapes them: the texts that are not a call's go to `escaped`.
        """
        self.escaped.clear()
        if any(escape in rendered for escape in _ESCAPES) and not self._holds_escapes():
            rendered = _ESCAPED.sub(self._unescaped, rendered)
        parts = self.pattern.split(rendered)  # text, mark, text, mark, ..., text
        marks = parts[1::2]
        if len(marks) % 2 or any(mark != self.close for mark in marks[1::2]) or self.close in marks[::2]:
            return None
        ends = list(accumulate(map(len, parts[::2])))
        spans = [(ends[at], ends[at + 1], self.table[ord(marks[at]) - self.base]) for at in range(0, len(marks), 2)]
        return "".join(parts[::2]), spans

    def _holds_escapes(self) -> bool:
        """Return whether somebody writes such escapes."""
        texts = json.dumps(self.messages, ensure_ascii=False, default=str)
        return any("\\" + escape in texts for escape in _ESCAPES)

    def _unescaped(self, match: re.Match[str]) -> str:
        """Return the mark that an escape stands for; an escape that is no mark stays."""
        code = int(match[1], 16) if match[1] else ord(json.loads(f'"{match[0]}"'))
        number = code - self.base
        if number < 0 or not (number < len(self.table) or chr(code) == self.close):
            return match[0]
        if number < len(self.table) and self.table[number].call is None:
            self.escaped.add(self.table[number].message)
        return chr(code)


@lru_cache(maxsize=64)
def cut_patterns(source: str) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """Return patterns of a text's cuts: line ends, and the literals with which a template compares or splits texts.

    The second pattern takes the white space around too; the first is fast where there is nothing to cut; the third is
    of the literals alone.
    """
    literals = {match[2] or match[4] for match in _CUTS.finditer(source)}
    cuts = sorted((x for x in literals if x.strip() and not x.isalnum()), key=len, reverse=True)
    escaped = ["\n", *map(re.escape, cuts)]
    patterns = ("|".join(escaped), "|".join(rf"\s*{cut}\s*" for cut in escaped), "|".join(escaped[1:]) or "(?!)")
    first, second, third = map(re.compile, patterns)
    return first, second, third


def thinks(message: Message) -> bool:
    """Return whether a message holds reasoning."""
    return not _REASONING.isdisjoint(message) and any(message.get(key) for key in REASONING_KEYS)


def calls_of(message: Message) -> Sequence[Any]:
    """Return the calls of a message."""
    calls = message.get("tool_calls") or ()
    return calls if isinstance(calls, list | tuple) else ()
