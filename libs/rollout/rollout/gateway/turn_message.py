"""A turn's text as the parts of OpenAI's message, told as it comes: reasoning, content, calls.

1. chat_tools' StreamParser says what the text is; its reasoning and content are told at once, a call when it is whole.
2. White space beside another part is the format's and not told: it waits until more of its own part follows.
3. What can't be read as a call, or is one where none may be made, is content as the model wrote it. Where it ends is
   known at the end of the turn, so content waits from there on.

Invariants (tests): the deltas add up to the message, however the text is cut; nothing told is taken back.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from chat_tools.parsing.parser import StreamParser
from chat_tools.parsing.result import CallFinished, Event, MalformedFound, ParsedMessage, TextDelta

Delta = dict[str, Any]


class TurnMessage:
    """Takes the text of one turn and gives the deltas of its message.

    `prefill` is what the prompt holds of the turn. `number` hands out the numbers of calls that bring no id. Without
    `may_call` a call is text.
    """

    def __init__(
        self, tool_format: str, tools: Sequence[Any], prefill: str, *, may_call: bool, number: Callable[[], int]
    ) -> None:
        self._parser = StreamParser(tool_format, tools, prefill=prefill)
        self._may_call = may_call
        self._number = number
        self._text = ""
        self._last = ""  # the part that came last
        self._space = {"content": "", "reasoning_content": ""}  # waits for more of its part
        self._new_thought = False
        self._drop_space = False  # at the beginning of the content, which something else stands before
        self._apart = False  # another part came since the last word of the content
        self._literal: int | None = None  # from this character on, content is told at the end
        self.content = ""
        self.reasoning = ""
        self.calls: list[dict[str, Any]] = []

    def feed(self, text: str) -> list[Delta]:
        """Take more text, and return the deltas of what is settled by it."""
        self._text += text
        return _merged(delta for event in self._parser.feed(text) for delta in self._told(event))

    def finish(self) -> list[Delta]:
        """End the turn, and return its last deltas."""
        parsed = self._parser.finish()
        deltas = [delta for event in self._parser.last_events() for delta in self._told(event)]
        if self._literal is not None:
            deltas += self._say(self._rest(parsed, self._literal), self._literal == 0)
        space = self._space["content"]
        if space and not self._apart and self._last == "content" and self._text.endswith(space):
            deltas += self._tell("content", space)
        return _merged(deltas)

    def message(self) -> dict[str, Any]:
        """Return the message as the API has it, to which the deltas add up."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message |= {"tool_calls": self.calls, "content": self.content or None}
        return message

    def _told(self, event: Event) -> list[Delta]:
        if isinstance(event, TextDelta) and event.kind == "reasoning":
            return self._think(event.text)
        if isinstance(event, TextDelta):
            return [] if self._literal is not None else self._say(event.text, self._text.startswith(event.text))
        if isinstance(event, CallFinished) and self._may_call:
            self._leave_content("call")
            self.calls.append(event.call.to_openai(self._number()))
            return [{"tool_calls": [{"index": len(self.calls) - 1, **self.calls[-1]}]}]
        if self._literal is None and isinstance(event, CallFinished | MalformedFound):
            part = event.call if isinstance(event, CallFinished) else event.malformed
            self._literal = part.span[0]
        return []

    def _think(self, text: str) -> list[Delta]:
        """More reasoning; a further thought begins on a line of its own."""
        part = "reasoning_content"
        if self._last != part:
            self._leave_content(part)
            self._space[part] = ""
            self._new_thought = True
        if self._new_thought:
            text = text.lstrip()
            if not text:
                return []
            self._new_thought = False
            self._space[part] = "\n" if self.reasoning else ""
        return self._told_but_for_space(part, text)

    def _leave_content(self, part: str) -> None:
        """Another part comes, which white space alone before it borders on."""
        self._last, self._apart = part, True
        if not self.content:
            self._space["content"] = ""

    def _say(self, text: str, at_start: bool) -> list[Delta]:
        """More content; `at_start`: nothing stands before it."""
        if not self.content and not self._space["content"]:
            self._drop_space = self._drop_space or bool(self._last) or not at_start
        self._last = "content"
        if self._drop_space and not self.content:
            text = text.lstrip()
        return self._told_but_for_space("content", text)

    def _told_but_for_space(self, part: str, text: str) -> list[Delta]:
        body = text.rstrip()
        if not body:
            self._space[part] += text
            return []
        self._apart = self._apart and part != "content"
        told = self._space[part] + body
        self._space[part] = text[len(body) :]
        return self._tell(part, told)

    def _tell(self, part: str, text: str) -> list[Delta]:
        if part == "content":
            self.content += text
        else:
            self.reasoning += text
        return [{part: text}]

    def _rest(self, parsed: ParsedMessage, start: int) -> str:
        """What is content from a character on."""
        parts = []
        for segment in parsed.segments:
            if segment.start < start:
                continue
            if segment.kind == "content":
                parts.append(parsed.text[segment.inner_start : segment.inner_end])
            elif segment.kind == "malformed" or (segment.kind == "call" and not self._may_call):
                parts.append(parsed.text[segment.start : segment.end])
        return "".join(parts)


def _merged(deltas: Iterable[Delta]) -> list[Delta]:
    """Neighbours that are text of one part as one delta."""
    merged: list[Delta] = []
    for delta in deltas:
        part = next(iter(delta))
        if merged and part != "tool_calls" and part in merged[-1]:
            merged[-1][part] += delta[part]
        else:
            merged.append(dict(delta))
    return merged
