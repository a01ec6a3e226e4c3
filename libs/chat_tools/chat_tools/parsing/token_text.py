"""Sampled tokens as text in which only special tokens are markers.

A tokenizer's added tokens are what a model calls and ends turns with. The same characters, written letter by letter,
are words about them. Of those the first character is replaced, up to the result, by one that no text has (a Unicode
noncharacter), so that no marker is found there; lengths and positions stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from chat_tools.known_formats.grammar import Format
from chat_tools.parsing.result import (
    ArgumentsDelta,
    CallDropped,
    CallFinished,
    CallStarted,
    Event,
    MalformedFound,
    ParsedMessage,
    Retracted,
    TextDelta,
    ToolCall,
)

_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # no text that is interchanged has them
_STRAY = re.compile("[" + "".join(_NONCHARACTERS) + "]")
_ESCAPED = re.compile(r"\\u(fd[de][0-9a-f])(?<!\\\\ufd[de][0-9a-f])")  # in the JSON text of a lone surrogate
_UNKNOWN = "\ufffd"


@dataclass(frozen=True)
class SpecialTokens:
    """A tokenizer's added tokens beside a format: which are markers of it, and how those that are none are hidden.

    `beginnings`: what a marker that is written letter by letter may have come to.
    """

    vocabulary: dict[str, int]
    added: dict[int, str]
    markers: frozenset[str]
    beginnings: frozenset[str]
    longest: int
    marker: re.Pattern[str]
    hide: dict[int, int]
    show: dict[int, int]


_KNOWN: WeakKeyDictionary[Any, dict[Format, SpecialTokens]] = WeakKeyDictionary()


def special_tokens(tokenizer: Any, fmt: Format) -> SpecialTokens:
    """Return the special tokens of a tokenizer beside a format. Cached while the tokenizer's are the same."""
    known, vocabulary = _KNOWN.setdefault(tokenizer, {}), tokenizer.get_added_vocab()
    if fmt not in known or known[fmt].vocabulary != vocabulary:
        known[fmt] = _special_tokens(vocabulary, fmt)
    return known[fmt]


def _special_tokens(vocabulary: dict[str, int], fmt: Format) -> SpecialTokens:
    literals = "\n".join(_strings(fmt)).replace("\\", "")  # patterns too
    markers = frozenset(text for text in vocabulary if text and text in literals)
    firsts = dict(zip(sorted({marker[0] for marker in markers}), _NONCHARACTERS, strict=False))
    return SpecialTokens(
        vocabulary=vocabulary,
        added={token: text for text, token in vocabulary.items()},
        markers=markers,
        beginnings=frozenset(marker[:length] for marker in markers for length in range(1, len(marker) + 1)),
        longest=max(map(len, markers), default=1),
        marker=re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or "(?!)"),
        hide={ord(first): ord(stand_in) for first, stand_in in firsts.items()},
        show={ord(stand_in): ord(first) for first, stand_in in firsts.items()},
    )


class TokenText:
    """The text of sampled tokens, in pieces. ValueError for a tokenizer that is not a fast one."""

    def __init__(self, tokenizer: Any, fmt: Format) -> None:
        from tokenizers.decoders import DecodeStream  # comes with a fast tokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("tokens are parsed with a fast tokenizer: load it with use_fast=True, or feed its text")
        self._backend: Any = backend
        self._stream = DecodeStream(skip_special_tokens=False)
        self._special = special_tokens(tokenizer, fmt)
        self.markers = self._special.markers
        self._pending: list[int] = []
        self._held = ""  # may be the beginning of a marker that is written letter by letter
        self._hidden = False

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that more tokens make certain."""
        pieces: list[str] = []
        words: list[str] = []  # between special tokens
        step, backend, added = self._stream.step, self._backend, self._special.added
        for token in ids:
            chunk = step(backend, token)
            if chunk is None:  # a character that is not whole yet
                self._pending.append(token)
                continue
            if self._pending:
                self._pending = []
            if token not in added:
                words.append(chunk)
                continue
            before, marker, after = chunk.rpartition(added[token])
            pieces += [self._words("".join([*words, before]), whole=True), marker]
            words = [after]
        return "".join([*pieces, self._words("".join(words), whole=False)])

    def finish(self) -> str:
        """Return the text that was held back."""
        rest = self._backend.decode(self._pending, skip_special_tokens=False) if self._pending else ""
        self._pending = []
        return self._words(rest, whole=True)

    def _words(self, text: str, whole: bool) -> str:
        """Return text that is no marker, but for what may go on as one unless it is `whole`."""
        special = self._special
        text = self._held + _STRAY.sub(_UNKNOWN, text)
        self._held = ""
        if not whole:
            for at in range(max(0, len(text) - special.longest + 1), len(text)):
                if text[at:] in special.beginnings:
                    text, self._held = text[:at], text[at:]
                    break
        written = special.marker.sub(lambda match: match[0][0].translate(special.hide) + match[0][1:], text)
        self._hidden = self._hidden or written != text
        return written

    def shown(self, text: str) -> str:
        """Return a text as the model wrote it."""
        return text.translate(self._special.show) if self._hidden else text

    def events(self, events: list[Event]) -> list[Event]:
        """Return events with their texts as the model wrote them."""
        return [self._event(event) for event in events] if self._hidden else events

    def _event(self, event: Event) -> Event:
        match event:
            case TextDelta() | ArgumentsDelta() | Retracted():
                return event._replace(text=self.shown(event.text))
            case CallStarted():
                return event._replace(name=self.shown(event.name), id=event.id and self.shown(event.id))
            case CallFinished():
                return event._replace(call=self._call(event.call))
            case CallDropped():
                return event._replace(reason=self.shown(event.reason))
            case MalformedFound():
                return MalformedFound(event.malformed._replace(reason=self.shown(event.malformed.reason)))

    def _call(self, call: ToolCall) -> ToolCall:
        shown = self.shown
        notes = tuple(map(shown, call.diagnostics))
        name, arguments = shown(call.name), shown(_ESCAPED.sub(lambda m: chr(int(m[1], 16)), call.arguments))
        return replace(call, name=name, arguments=arguments, id=call.id and shown(call.id), diagnostics=notes)

    def message(self, message: ParsedMessage) -> ParsedMessage:
        """Return a message with its texts as the model wrote them."""
        if not self._hidden:
            return message
        return replace(
            message,
            text=self.shown(message.text),
            content=self.shown(message.content),
            reasoning=self.shown(message.reasoning),
            tool_calls=tuple(map(self._call, message.tool_calls)),
            malformed=tuple(bad._replace(reason=self.shown(bad.reason)) for bad in message.malformed),
        )


def _strings(value: object) -> Iterator[str]:
    """Yield the texts in a format."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _strings(item)
