"""The content of an answer as vLLM gives it: a stream tells what the whole answer has.

1. All that is no call is content, what is malformed too, but for a closing marker behind a call that closes nothing.
2. vLLM's reasoning parser has taken thoughts away. Where there is none they are content, with their markers; what is in
   them is no call. Thoughts in a channel of their own (harmony) are left out, as its headers are.
3. A line's end waits for more: before and behind calls it is the format's. Blanks do not wait.
4. In an answer without a call every character is content, so that the rest is told at the end.
"""

from __future__ import annotations

from chat_tools.known_formats.grammar import Format
from chat_tools.parsing.parser import StreamParser
from chat_tools.parsing.result import Segment


class AnswerContent:
    """The content of a parser's text (with the prefill ""), as far as it is certain."""

    def __init__(self, fmt: Format, stream: StreamParser) -> None:
        self._stream = stream
        self._closes = {close for _, close in fmt.calls} | {*(fmt.section or ())[1:]}
        self._thoughts = bool(fmt.reasoning)
        self._text = ""
        self._index, self._read = 0, 0  # the segment that is read, and how far
        self._blank = ""  # white space that is content only if more content follows
        self._begun = False  # whether content was told
        self._called = False  # whether a call came

    def settled(self, text: str = "") -> str:
        """Return the content to send now, after the parser was fed with this text or finished."""
        self._text += text
        content, first = "", self._index
        for index, segment in enumerate(self._stream.segments(first), first):
            self._index, self._read = index, max(self._read, segment.start)
            content += self._trimmed(self._new(segment))
            self._called = self._called or segment.kind == "call"
        return content

    def rest(self) -> str:
        """Return the rest of the content at the end."""
        rest, self._blank = self._blank, ""
        return "" if self._called else rest

    def _new(self, segment: Segment) -> str:
        """Return the content of a segment that was not sent yet."""
        begin, self._read = self._read, segment.end
        if segment.kind == "content":
            return self._text[max(begin, segment.inner_start) : segment.inner_end]
        if segment.kind == "call" or (segment.kind == "reasoning" and not self._thoughts):
            return ""
        text = self._text[begin : segment.end]
        return "" if segment.kind == "malformed" and self._called and text.strip() in self._closes else text

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
