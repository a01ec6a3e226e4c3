"""Values from text that a model wrote: JSON first, then Python-like literals. Nothing is evaluated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, NoReturn

MAX_DEPTH = 100
MAX_NOTES = 50
# JSON is read at any size. What is not JSON is read value by value, which is slow: no more of them than this.
MAX_LITERAL_VALUES = 20_000
_MAX_DIGITS = 4000  # Python refuses to convert longer integers; they stay text


class LiteralError(ValueError):
    """The text is neither JSON nor a literal."""


def loads(text: str, notes: list[str] | None = None) -> Any:
    """Return the value of `text`, JSON or else a literal. LiteralError if it is neither.

    Only values that JSON can say come back: numbers are finite (others stay text), keys are strings, tuples become
    lists. `notes` collects what was unusual: "duplicate key 'a'", "number 1e999 kept as text".
    """
    value = loads_plain(text)
    return loads_with_notes(text, [] if notes is None else notes) if value is FALLBACK else value


def loads_plain(text: str) -> Any:
    """Return the value of JSON with nothing unusual in it, else FALLBACK; raise LiteralError for too deep nesting."""
    try:
        text = text.strip(" \t\n\r")
        value, end = _PLAIN.raw_decode(text)
    except (ValueError, RecursionError):
        return FALLBACK
    if end != len(text):
        return FALLBACK
    _check_depth(text, value)
    return value


def loads_with_notes(text: str, notes: list[str]) -> Any:
    """Return the value of JSON or a literal, and note what is unusual in it."""
    first: list[str] = []
    try:
        value = json.loads(
            text,
            strict=False,
            parse_constant=_refuse,
            parse_float=lambda digits: _number(digits, first),
            parse_int=(lambda digits: _number(digits, first)) if _LONG_DIGITS.search(text) else None,
            object_pairs_hook=lambda pairs: _object(pairs, first),
        )
    except (ValueError, RecursionError):
        value = FALLBACK
    if value is FALLBACK and "'" in text and '"' not in text and "\\" not in text:
        value = loads_plain(text.replace("'", '"'))  # a literal whose strings are JSON's but for the quotes
    if value is FALLBACK:
        return LiteralParser(text, notes).whole()
    _check_depth(text, value)
    notes.extend(first)
    return value


def is_no_value(prefix: str) -> bool:
    """Return whether text with this beginning is neither JSON nor a literal, whatever follows."""
    return _NO_VALUE.match(prefix) is not None


def literal_cost(text: str) -> int:
    """Return an estimate of the cost of reading a literal value by value, for `Reader.charge`."""
    return 3 * sum(map(text.count, ",[{(")) + len(text) // 50


def _check_depth(text: str, value: Any) -> None:
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    level, depth = [value], 0
    while level := [v for item in level for v in _inner(item) if type(v) in _CONTAINERS]:
        depth += 1
        if depth >= MAX_DEPTH:
            raise LiteralError(f"nested deeper than {MAX_DEPTH}")


def _inner(value: Any) -> Iterable[Any]:
    return value.values() if type(value) is dict else value if type(value) is list else ()


def note(notes: list[str], text: str) -> None:
    """Add a note, unless there are very many."""
    if len(notes) < MAX_NOTES:
        notes.append(text)
    elif len(notes) == MAX_NOTES:
        notes.append("further notes are left out")


def dumps(value: Any) -> str:
    """Return `value` as JSON text that encodes to UTF-8."""
    text = _ENCODER.encode(value)
    if _SURROGATE.search(text):
        return json.dumps(value, allow_nan=False)
    return text


FALLBACK = object()
_CONTAINERS = frozenset([dict, list])
_SURROGATE = re.compile("[\ud800-\udfff]")
_LONG_DIGITS = re.compile(rf"\d{{{_MAX_DIGITS + 1}}}")


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if value - value != 0:
        raise ValueError("not finite")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("duplicate keys")
    return result


_PLAIN = json.JSONDecoder(strict=False, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique)
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False)


def _object(pairs: list[tuple[str, Any]], notes: list[str]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                note(notes, f"duplicate key {key!r}: the last one counts")
            seen.add(key)
    return result


def _number(digits: str, notes: list[str]) -> int | float | str:
    if len(digits) <= _MAX_DIGITS:
        if _INTEGER.fullmatch(digits):
            return int(digits)
        value = float(digits)
        if value - value == 0:  # finite
            return value
    note(notes, f"number {digits[:20]} kept as text")
    return digits


_INTEGER = re.compile(r"[+-]?[0-9_]+")
_SPACE = re.compile(r"\s*")
_STRING = re.compile(
    r"""[uU]?(?:'''((?:[^'\\]++|\\[\s\S]|'(?!''))*+)'''|\"\"\"((?:[^"\\]++|\\[\s\S]|"(?!""))*+)\"\"\""""
    r"""|'((?:[^'\\]++|\\[\s\S])*+)'|"((?:[^"\\]++|\\[\s\S])*+)")"""
)
_NUMBER = re.compile(r"[+-]?(?:\d[\d_]*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?(?![\w.])")
_BARE = re.compile(r"""[^\s,{}\[\]()"'<][^,{}\[\]]*""")
_WORD = re.compile(r"[A-Za-z_][\w.\-]*")
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_NO_VALUE = re.compile(
    r"""\s*+(?:[^\s\w{\[("'+\-.]|[^\W\dA-Za-z_]"""  # no value begins with such a character
    r"|[A-Za-z_][\w.\-]{5}"  # nor with so long a word
    r"""|(?!(?:true|false|null|True|False|None)\b)[A-Za-z_][\w.\-]{0,4}+(?=[^\w.\-"'])"""
    r"|(?:true|false|null|True|False|None)\s*+\S"  # these are values alone
    r"|[+\-.\d][\d_.eE+\-\s]*+[^\d_.eE+\-\s])"  # and a number is nothing but one
)
ESCAPE = re.compile(
    r"\\(?:u([dD][89abAB][0-9a-fA-F]{2})\\u([dD][c-fC-F][0-9a-fA-F]{2})"  # a pair of surrogates is one character
    r"|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|U([0-9a-fA-F]{8})|(\r\n|[\s\S]))"
)
_ESCAPES = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "0": "\0",
    "\n": "",
    "\r\n": "",
}


def decode_escapes(text: str) -> str:
    r"""Replace the backslash escapes of JSON and Python strings; an unknown one stays as it is written."""
    if "\\" not in text:
        return text
    return ESCAPE.sub(_unescape_one, text)


def _unescape_one(match: re.Match[str]) -> str:
    high, low = match.group(1, 2)
    if high:
        return chr(0x10000 + (int(high, 16) - 0xD800) * 0x400 + int(low, 16) - 0xDC00)
    for code in match.group(3, 4, 5):
        if code:
            return chr(int(code, 16)) if int(code, 16) <= 0x10FFFF else match.group()
    letter = match.group(6)
    if letter in "\"'\\/":
        return letter
    return _ESCAPES.get(letter, match.group())


class LiteralParser:
    """A recursive reader of literals: strings, numbers, words, lists, tuples, dicts. Depth is bounded.

    `quotes` are further string delimiters, which know no escapes; with `bare_keys`, dict keys and strings may be plain.
    """

    def __init__(
        self, text: str, notes: list[str], pos: int = 0, quotes: tuple[str, ...] = (), bare_keys: bool = False
    ) -> None:
        self.text = text
        self.pos = pos
        self.notes = notes
        self.quotes = quotes
        self.bare_keys = bare_keys
        self.values = 0

    def whole(self) -> Any:
        """Read one value that is the whole text."""
        value = self.value(0)
        self.skip()
        if self.pos != len(self.text):
            raise LiteralError(f"unexpected {self.text[self.pos : self.pos + 10]!r} after the value")
        return value

    def skip(self) -> None:
        """Skip white space."""
        match = _SPACE.match(self.text, self.pos)
        assert match is not None
        self.pos = match.end()

    def take(self, literal: str) -> bool:
        """Skip white space and, if it comes next, the literal."""
        self.skip()
        if self.text.startswith(literal, self.pos):
            self.pos += len(literal)
            return True
        return False

    def value(self, depth: int) -> Any:
        """Read one value."""
        if depth > MAX_DEPTH:
            raise LiteralError(f"nested deeper than {MAX_DEPTH}")
        self.values += 1
        if self.values > MAX_LITERAL_VALUES:
            raise LiteralError(f"more than {MAX_LITERAL_VALUES} values that are not JSON")
        if self.take("{"):
            return self.dict(depth + 1)
        if self.take("["):
            return self.items("]", depth + 1)
        if self.take("("):
            return self.parenthesis(depth + 1)
        return self.scalar()

    def scalar(self) -> Any:
        """Read a string, number or word."""
        for quote in self.quotes:
            if self.take(quote):
                end = self.text.find(quote, self.pos)
                if end < 0:
                    raise LiteralError("string not closed")
                value, self.pos = self.text[self.pos : end], end + len(quote)
                return value
        if match := _STRING.match(self.text, self.pos):
            self.pos = match.end()
            return decode_escapes(match[match.lastindex or 0])
        if self.bare_keys and (match := _BARE.match(self.text, self.pos)):
            return self._bare(match)
        if match := _NUMBER.match(self.text, self.pos):
            self.pos = match.end()
            try:
                return _number(match.group(), self.notes)
            except ValueError as error:
                raise LiteralError(f"not a number: {match.group()[:20]!r}") from error
        match = _WORD.match(self.text, self.pos)
        if match and match.group() in _WORDS:
            self.pos = match.end()
            return _WORDS[match.group()]
        raise LiteralError(f"no value at {self.text[self.pos : self.pos + 10]!r}")

    def _bare(self, match: re.Match[str]) -> Any:
        """Read a value without quotes up to the next comma or bracket: a number, a word, or a string."""
        self.pos = match.end()
        text = match.group().rstrip()
        if text in _WORDS:
            return _WORDS[text]
        if (number := _NUMBER.fullmatch(text)) and not number.group().endswith("_"):
            return _number(text, self.notes)
        note(self.notes, f"string {text[:20]!r} without quotes")
        return text

    def items(self, close: str, depth: int) -> list[Any]:
        """Read values up to the closing bracket; a comma may follow the last."""
        values: list[Any] = []
        while not self.take(close):
            values.append(self.value(depth))
            if not self.take(","):
                if not self.take(close):
                    raise LiteralError(f"expected ',' or {close!r} at {self.text[self.pos : self.pos + 10]!r}")
                break
        return values

    def parenthesis(self, depth: int) -> Any:
        """Read a tuple (as a list), or a value in parentheses."""
        start = self.pos
        values = self.items(")", depth)
        is_tuple = len(values) != 1 or self.text[start : self.pos - 1].rstrip().endswith(",")
        return values if is_tuple else values[0]

    def dict(self, depth: int) -> dict[str, Any]:
        """Read the pairs of a dict; keys that are not strings are written as JSON writes them."""
        pairs: list[tuple[str, Any]] = []
        while not self.take("}"):
            key = self.key()
            if not self.take(":"):
                raise LiteralError(f"expected ':' at {self.text[self.pos : self.pos + 10]!r}")
            pairs.append((key, self.value(depth)))
            if not self.take(","):
                if not self.take("}"):
                    raise LiteralError(f"expected ',' or '}}' at {self.text[self.pos : self.pos + 10]!r}")
                break
        return _object(pairs, self.notes)

    def key(self) -> str:
        """Read a key."""
        self.skip()
        if self.bare_keys and (match := _WORD.match(self.text, self.pos)):
            self.pos = match.end()
            return match.group()
        key = self.scalar()
        return key if isinstance(key, str) else json.dumps(key)
