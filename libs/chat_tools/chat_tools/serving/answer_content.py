"""The content of an answer as vLLM gives it: what is told of it event by event is what the whole answer has.

1. All that is no call is content, what is malformed too, but for a closing marker behind a call that closes nothing.
2. A line's end waits for more: before and behind calls it is the format's. Blanks do not wait.
3. In an answer without a call every character is content, so that the rest is told at the end.
"""

from __future__ import annotations

from chat_tools.parsing.grammar import Format
from chat_tools.parsing.result import CallFinished, Event, MalformedFound, TextDelta


class AnswerContent:
    """Takes an answer's text and events in turn, and gives the content that can be told."""

    def __init__(self, fmt: Format) -> None:
        closes = [close for _, close in fmt.calls]
        self._closes = {*closes, *(fmt.section or ())[1:]}
        self._text: list[str] = []
        self._blank = ""  # white space that is content only if more content follows
        self._begun = False  # whether content was told
        self._called = False  # whether a call came

    def feed(self, text: str) -> None:
        """Take the text whose events come next."""
        self._text.append(text)

    def told(self, event: Event) -> str:
        """Return the content to tell now."""
        if isinstance(event, CallFinished):
            self._called = True
        if isinstance(event, TextDelta) and event.kind == "content":
            return self._trimmed(event.text)
        if isinstance(event, MalformedFound):
            self._text = ["".join(self._text)]
            text = self._text[0][slice(*event.malformed.span)]
            return "" if self._called and text.strip() in self._closes else self._trimmed(text)
        return ""

    def rest(self) -> str:
        """Return what is left to tell at the end."""
        rest, self._blank = self._blank, ""
        return "" if self._called else rest

    def _trimmed(self, text: str) -> str:
        text = self._blank + text
        if self._called and not self._begun:
            text = text.lstrip()
        end = len(text.rstrip())
        if end or self._begun:
            end += len(text[end:].partition("\n")[0])
        self._blank = text[end:]
        self._begun = self._begun or end > 0
        return text[:end]
