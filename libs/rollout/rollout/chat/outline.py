"""Outline of a conversation: the few messages that a chat template has to see to write what follows the last turn.

Strategy
1. A unit is an assistant's turn with what others say to it; the first one is all that precedes the first turn. Its kind
   holds what a template may branch on: roles, keys, types, blank texts, and the template's own literals in the texts.
2. Kept are the first two units, the last two, and the last one of each kind. Between the last two user messages a
   rewritten kind of turn shows as well in its last unit as in all of them.
3. An even number of messages is left out, as templates that want alternating roles look at an index modulo 2.
4. A template that could count further is not shortened (`branch_texts` returns None): one with a larger number in it,
   another modulus, or a filter that groups.

What an outline gives is compared with the whole conversation before it is relied on (`rollout.chat.short_history`).
"""

import re
from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from jinja2 import Environment, TemplateSyntaxError

from rollout.chat.messages import Message

MAX_KINDS = 12  # of units in one conversation; with more of them little would be left out
MAX_NUMBER = 3  # in a template that is shortened
_COUNTING = frozenset(("batch", "cycle", "divisibleby", "random", "slice", "sum"))
_JOINING = frozenset(("+", "~", "=", "else"))  # before a literal that is only written
_TESTING = frozenset(("==", "!=", "in", "not", "|", "."))  # after one that is more than that
_ARITHMETIC = frozenset(("*", "**", "//", "/"))
_MESSAGES = re.compile(r"message|history|index|revindex")
Kind = tuple[Any, ...]


class BranchTexts(NamedTuple):
    """Literals of a template: those to look for within a text, and whole words."""

    within: frozenset[str]
    words: frozenset[str]


class Unit(NamedTuple):
    """Messages `start:end` of a conversation: a turn and what others say to it."""

    start: int
    end: int
    kind: Kind


@lru_cache(maxsize=64)
def branch_texts(source: str) -> BranchTexts | None:
    """Return the literals that a template may look for in texts; None where it might count messages."""
    try:
        tokens = [(kind, text) for _, kind, text in Environment().lex(source) if kind != "whitespace"]
    except TemplateSyntaxError:
        return None
    if _counts(_without_plain_macros(tokens)):
        return None
    literals = set()
    for before, (kind, text), after in zip([("", ""), *tokens], tokens, [*tokens[1:], ("", "")], strict=False):
        joined = before[0] == "variable_begin" or before[1] in _JOINING
        if kind == "string" and not (joined and after[1] not in _TESTING):
            literals.add(text[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape"))  # as Jinja does
    words = frozenset(text for text in literals if text.isalnum())
    return BranchTexts(frozenset(text for text in literals - words if text.strip()), words)


def _counts(tokens: Sequence[tuple[str, str]]) -> bool:
    """Return whether the tokens of a template could tell numbers of messages apart that differ by two."""
    before = ("", "")
    for at, (kind, text) in enumerate(tokens):
        if kind == "name" and text in _COUNTING:
            return True
        if kind == "integer" and int(text) > MAX_NUMBER and tokens[at - 2][1] != "indent":
            return True
        if kind == "operator" and text in _ARITHMETIC and before[0] != "string":
            return True
        if (kind, text) == ("operator", "%") and before[0] != "string" and tokens[at + 1] != ("integer", "2"):
            return True
        before = kind, text
    return False


def _without_plain_macros(tokens: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Leave out the macros that name neither messages nor places in a loop: they write tools and values."""
    left: list[tuple[str, str]] = []
    start = None
    for at, token in enumerate(tokens):
        if token == ("name", "macro"):
            start = at
        elif token == ("name", "endmacro") and start is not None:
            inside = tokens[start:at]
            if any(kind == "name" and _MESSAGES.match(text) for kind, text in inside):
                left += inside
            start = None
        elif start is None:
            left.append(token)
    return left


class Outline:
    """A conversation's units so far, of which a bounded number is kept; `count` messages were added.

    A unit is closed once the next assistant's turn comes.
    """

    def __init__(self, texts: BranchTexts) -> None:
        self.count = 0
        self.texts = texts
        self._open = 0  # the first message of the unit that is not closed
        self._calls: frozenset[Any] = frozenset()  # ids of its calls
        self._kinds: tuple[Any, ...] = ()  # of its messages
        self._first: tuple[Unit, ...] = ()
        self._recent: tuple[Unit, ...] = ()
        self._odd: deque[Unit] = deque(maxlen=MAX_KINDS + 5)  # with an odd number of messages, for the parity
        self._last: dict[Kind, Unit] = {}

    def copy(self) -> "Outline":
        """Return an outline to which other messages may be added."""
        other = copy(self)
        other._odd, other._last = copy(self._odd), copy(self._last)
        return other

    def extend(self, messages: Sequence[Message]) -> None:
        """Add messages."""
        for message in messages:
            if message.get("role") == "assistant":
                self._close()
                self._calls = frozenset(call.get("id") for call in message.get("tool_calls") or ())
            self._kinds += (self._kind(message),)
            self.count += 1

    def _close(self) -> None:
        unit = Unit(self._open, self.count, _run_lengths(self._kinds))
        if len(self._first) < 2:
            self._first += (unit,)
        self._recent = (*self._recent[-1:], unit)
        if (unit.end - unit.start) % 2:
            self._odd.append(unit)
        if len(self._last) <= MAX_KINDS:
            self._last[unit.kind] = unit
        self._open, self._kinds = self.count, ()

    def kept(self, new_messages: Sequence[Message]) -> tuple[list[Unit], Kind] | None:
        """Return the closed units to keep, and the kind of all that is kept; None to keep all messages.

        `new_messages` follow those that were added, in the kind alone.
        """
        if len(self._last) > MAX_KINDS:
            return None
        units = {*self._first, *self._recent, *self._last.values()}
        if (self._open - sum(unit.end - unit.start for unit in units)) % 2:
            units.add(next(unit for unit in reversed(self._odd) if unit not in units))
        kept = sorted(units)
        if sum(unit.end - unit.start for unit in kept) == self._open:
            return None
        said = (*self._kinds, *map(self._kind, new_messages))
        return kept, (*(unit.kind for unit in kept), _run_lengths(said))

    def select(self, messages: Sequence[Message], units: Sequence[Unit]) -> list[Message]:
        """Return the messages of closed units and those that are not in a closed one."""
        return [*(message for unit in units for message in messages[unit.start : unit.end]), *messages[self._open :]]

    def _kind(self, message: Message) -> Kind:
        answers = message.get("tool_call_id") in self._calls if message.get("role") == "tool" else None
        given = ((key, self._shape(key, value)) for key, value in sorted(message.items()) if value is not None)
        return (message.get("role"), answers, *given)

    def _shape(self, key: str, value: Any) -> Any:
        """Return what a template may tell about a value without printing it."""
        if isinstance(value, str):
            found = frozenset(text for text in self.texts.within if text in value)
            core = value.strip()
            blanks = (not value, value[:1].isspace(), value[-1:].isspace())
            return (*blanks, found, core if core in self.texts.words else None)
        if key == "arguments" and isinstance(value, Mapping):
            return frozenset(type(inner) for inner in value.values())
        if isinstance(value, Mapping):
            return tuple((name, self._shape(name, inner)) for name, inner in sorted(value.items()))
        if isinstance(value, list | tuple):
            return _run_lengths(tuple(self._shape(key, inner) for inner in value))
        return value if isinstance(value, bool) else type(value)


def _run_lengths(kinds: Sequence[Any]) -> Kind:
    """Return the kinds, those that follow one another once, with whether there were more."""
    return tuple((kind, next(run, None) is not None and next(run, None) is not None) for kind, run in groupby(kinds))
