"""A turn's text as the parts of OpenAI's message, told as it comes: reasoning, content, calls.

1. StreamParser says what the text is; its reasoning and content are told at once, a call as it comes or when it is
   whole.
2. White space beside another part is the format's and not told: it waits until more of its own part follows.
3. What can't be read as a call, or is one where none may be made, is content as the model wrote it. Where it ends is
   known at the end of the turn, so content waits from there on.
4. OpenAI's stream takes nothing back. Of a call that was begun and is dropped (CallDropped) a client keeps a name, and
   arguments that break off: no JSON. ShardMetadata again, it is the next entry, under the same id.

Invariants (tests): the deltas, but for entries whose arguments are no JSON, add up to the message, and this is the
whole text's `to_openai()`, however the text is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

from chat_tools.known_formats.grammar import Format
from chat_tools.parsing.openai import delta_of
from chat_tools.parsing.parser import StreamParser
from chat_tools.parsing.result import (
    ArgumentsDelta,
    CallFinished,
    CallStarted,
    Event,
    ParsedMessage,
    joined_text,
)

Delta = dict[str, Any]


class TurnMessage:
    """A converter of one turn's text to the deltas of its message.

    `prefill` is the part of the turn in the prompt. `number` yields the numbers of calls, from which calls without an
    id get one (0, 1, ... without it). Without `may_call` a call is text. `early` tells a call as it comes, its name
    first; without it a call is one delta, and no delta is of a call that is dropped.
    """

    def __init__(
        self,
        format: str | Format,  # noqa: A002 - the name that it has everywhere
        tools: Sequence[Any] | None = None,
        *,
        prefill: str,
        may_call: bool = True,
        number: Callable[[], int] | None = None,
        early: bool = True,
    ) -> None:
        self._parser = StreamParser(format, tools, prefill=prefill)
        self._may_call, self._early = may_call, early
        self._number: Callable[[], int] = number or count().__next__
        self._given: int | None = None  # the number of the call that was begun
        self._text = ""
        self._index = 0  # of the segment that is read
        self._read = -1  # how far it was read; -1 where it was not begun
        self._new_thought = False
        self._begun: list[int] = []  # the first two segments with content
        self._literal = False  # from here on, content is told at the end
        self._space = {"content": "", "reasoning_content": ""}  # waits for more of its part
        self.content = ""
        self.reasoning = ""
        self.calls: list[dict[str, Any]] = []

    def feed(self, text: str) -> list[Delta]:
        """Parse more text, and return the deltas that it settles."""
        self._text += text
        return self._settled(self._parser.feed(text))

    def finish(self) -> list[Delta]:
        """End the turn, and return its last deltas."""
        parsed = self._parser.finish()
        deltas = self._settled(self._parser.last_events())
        return _merged([*deltas, *self._emit("content", self._whole_content(parsed)[len(self.content) :])])

    def message(self) -> dict[str, Any]:
        """Return the message in the API's shape, to which the deltas add up."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message |= {"tool_calls": self.calls, "content": self.content or None}
        return message

    def _settled(self, events: Iterable[Event]) -> list[Delta]:
        deltas: list[Delta] = []
        first = self._index
        for index, segment in enumerate(self._parser.segments(first), first):
            new = index > self._index or self._read < 0
            if new:
                self._index, self._read = index, segment.inner_start
            text, self._read = self._text[self._read : segment.inner_end], segment.inner_end
            if segment.kind == "reasoning":
                deltas += self._add_reasoning(text, new)
            elif segment.kind == "content":
                deltas += self._add_content(text)
            else:
                self._literal = self._literal or segment.kind == "malformed" or not self._may_call
        return _merged([*deltas, *(delta for event in events for delta in self._call(event))])

    def _add_reasoning(self, text: str, new: bool) -> list[Delta]:
        """Return more reasoning; a further thought begins on a line of its own."""
        if new:
            self._space["reasoning_content"], self._new_thought = "", True
        if self._new_thought:
            text = text.lstrip()
            if not text:
                return []
            self._new_thought = False
            self._space["reasoning_content"] = "\n" if self.reasoning else ""
        return self._without_trailing_space("reasoning_content", text)

    def _add_content(self, text: str) -> list[Delta]:
        """Return more content, until it has to wait for the end."""
        if self._literal or not text:
            return []
        if len(self._begun) < 2 and self._index not in self._begun:
            self._begun.append(self._index)
        if not self.content and text.strip() and self._is_apart():
            self._space["content"], text = "", text.lstrip()
        return self._without_trailing_space("content", text)

    def _is_apart(self) -> bool:
        """Return whether another part comes before the first word of the content, or between it and its blanks."""
        first, *others = (self._parser.segments(index)[0] for index in self._begun)
        return first.start > 0 or any(first.end < other.start for other in others)

    def _without_trailing_space(self, part: str, text: str) -> list[Delta]:
        body = text.rstrip()
        if not body:
            self._space[part] += text
            return []
        settled, self._space[part] = self._space[part] + body, text[len(body) :]
        return self._emit(part, settled)

    def _emit(self, part: str, text: str) -> list[Delta]:
        if part == "content":
            self.content += text
        else:
            self.reasoning += text
        return [{part: text}] if text else []

    def _whole_content(self, parsed: ParsedMessage) -> str:
        """Return the content of the whole turn, which begins with the deltas so far."""
        if self._may_call:
            content: str = parsed.to_openai()["content"]
            return content
        literal = [s._replace(inner_end=s.end) if s.kind == "call" else s for s in parsed.segments]
        return joined_text(parsed.text, literal, ("content", "malformed", "call"))

    def _call(self, event: Event) -> list[Delta]:
        """Return more of a call. A call that is sent again, after it was dropped, keeps its number."""
        if not self._may_call or not isinstance(event, CallStarted | ArgumentsDelta | CallFinished):
            return []
        if self._given is None:
            self._given = self._number()
        if isinstance(event, CallFinished):
            self.calls.append(event.call.to_openai(self._given))
            self._given = None
            return [] if self._early else [{"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1]}]}]
        delta = delta_of(event, self._given - event.number) if self._early else None
        return [delta] if delta is not None else []


def _merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Merge neighbouring deltas that are text of one part."""
    merged: list[Delta] = []
    for delta in deltas:
        part = next(iter(delta))
        if merged and part != "tool_calls" and part in merged[-1]:
            merged[-1][part] += delta[part]
        else:
            merged.append(dict(delta))
    return merged
