"""Sampled tokens as text in which only special tokens are markers.

A tokenizer's added tokens are what a model calls and ends turns with. The same characters, written letter by letter,
are words about them. Of those the first character is replaced, up to the result, by one that no text has (a Unicode
noncharacter), so that no marker is found there; lengths and positions stay.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

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
_ESCAPED = re.compile(r"\\u(fd[de][0-9a-f])(?<!\\\\ufd[de][0-9a-f])")  # in the JSON text of a lone surrogate
_UNKNOWN = "\ufffd"


class TokenText:
    """The text of sampled tokens, in pieces. ValueError for a tokenizer that is not a fast one."""

    def __init__(self, tokenizer: Any, fmt: Format) -> None:
        from tokenizers.decoders import DecodeStream  # comes with a fast tokenizer

        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError("tokens are parsed with a fast tokenizer: load it with use_fast=True, or feed its text")
        self._backend: Any = backend
        self._stream = DecodeStream(skip_special_tokens=False)
        self._added = {token: text for text, token in tokenizer.get_added_vocab().items()}
        literals = "\n".join(_strings(fmt)).replace("\\", "")  # patterns too
        self.markers = frozenset(text for text in self._added.values() if text and text in literals)
        firsts = dict(zip(sorted({marker[0] for marker in self.markers}), _NONCHARACTERS, strict=False))
        self._marker = re.compile("|".join(map(re.escape, sorted(self.markers, key=len, reverse=True))) or "(?!)")
        self._hide = str.maketrans(firsts)
        self._show = str.maketrans({stand_in: first for first, stand_in in firsts.items()})
        self._stray = re.compile("[" + "".join(_NONCHARACTERS) + "]")
        self._pending: list[int] = []
        self._held = ""  # may be the beginning of a marker that is written letter by letter
        self._hidden = False

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that more tokens make certain."""
        pieces: list[str] = []
        words: list[str] = []  # between special tokens
        step, backend, added = self._stream.step, self._backend, self._added
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
        text = self._held + self._stray.sub(_UNKNOWN, text)
        self._held = ""
        if not whole:
            longest = max(map(len, self.markers), default=1)
            for at in range(max(0, len(text) - longest + 1), len(text)):
                if any(marker.startswith(text[at:]) for marker in self.markers):
                    text, self._held = text[:at], text[at:]
                    break
        written = self._marker.sub(lambda match: match[0][0].translate(self._hide) + match[0][1:], text)
        self._hidden = self._hidden or written != text
        return written

    def shown(self, text: str) -> str:
        """Return a text as the model wrote it."""
        return text.translate(self._show) if self._hidden else text

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
