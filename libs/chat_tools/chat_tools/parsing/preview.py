"""What can be said of a call before it is complete: its name, and the arguments as far as they are certain.

Strategy
1. The parser settles a call when it is complete. Between two pieces of text the part that is not settled yet, from the
   recorder's cursor on, is read here as well, each character once. Nothing of it goes back into the parse.
2. Only the usual spelling is followed: a section's marker, a call's, a name (preview_tables.py), and then arguments one
   after another (tag_states.py, bracket_states.py). At the first thing that could be read in two ways (a tag inside a
   value) the preview waits for the parser, so that what was said holds.
3. What is said is JSON text in the parser's own spelling (streamed_call.py). A string is said as it comes; what is
   nested, or may still be a number or JSON, at its own end; so is a string whose schema asks for more than types (an
   enum). A call whose arguments stand before its name, a key with an escape, or a string without quotes (Gemma) waits
   for the parser.
4. When the parser has the call, the rest is said. A call that the parser refuses, or reads in another way (a key given
   twice), is dropped by an event of its own; in the second case it is told again as a new one.

Invariants (tests): a call that was started is finished or dropped; the deltas of a finished one are its arguments'
text; without a piece boundary inside a call nothing is read twice.
"""

from __future__ import annotations

from collections.abc import Callable

from chat_tools.parsing.arguments import ToolSet
from chat_tools.parsing.bracket_states import BracketStates
from chat_tools.parsing.cursor import Reader
from chat_tools.parsing.preview_tables import CallHeader, PreviewTables
from chat_tools.parsing.result import Event, ToolCall
from chat_tools.parsing.streamed_call import ReaderStates, StreamedCall
from chat_tools.parsing.tag_states import TagStates

_LONGEST_HEADER, _LONGEST_BETWEEN = 600, 60
_WORK_PER_CHARACTER, _SPARE_WORK = 3, 60_000  # past that, calls are told when they are complete


class Preview:
    """A preview of the call that is coming, and of each that came. `tell` takes the events."""

    def __init__(self, tables: PreviewTables, tools: ToolSet, tell: Callable[[Event], None]) -> None:
        self.tables, self.tools = tables, tools
        self._told = StreamedCall(tools, tell)
        self._work = 0
        self._reset(-1)

    def _reset(self, begin: int) -> None:
        self._begin = self._place = begin
        self._steps: ReaderStates | None = None  # none before the call's head

    @property
    def started(self) -> bool:
        """The state of the current call: started and not complete."""
        return self._told.name is not None

    def look(self, reader: Reader, begin: int, in_list: bool) -> None:
        """Read the new part of the text from `begin` on, in which the parser waits for the end of a call.

        `in_list` says that calls of the list went before, so that one may follow without a marker.
        """
        if begin != self._begin:
            self._reset(begin)
        while self._place < reader.end and self._work <= _WORK_PER_CHARACTER * reader.end + _SPARE_WORK:
            steps = self._steps
            if steps is not None and steps.state == steps.stop:
                break
            text = reader.slice(self._place, reader.end)
            self._work += len(text) + 1
            before = steps.state if steps is not None else None
            taken = steps.state(text) if steps is not None else self._head(text, in_list)
            self._place += taken
            if not taken and (steps is None or steps.state == before):
                break

    def finish(self, call: ToolCall) -> None:
        """Emit the rest of a call that is complete, or all of it."""
        self._told.finish(call)
        self._reset(-1)

    def drop(self, reason: str) -> None:
        """Drop a call that was started and is none."""
        self._told.drop(reason)
        self._reset(-1)

    def forget(self) -> None:
        """Forget a call without an event: all of its events were held back."""
        self._told.forget()
        self._reset(-1)

    def _head(self, text: str, in_list: bool) -> int:
        """Read up to a call's name and emit it; return the number of characters read, 0 to wait for more."""
        tables = self.tables
        for head in [*tables.further, *tables.heads] if in_list else tables.heads:
            match = head.pattern.match(text)
            if match is None:
                continue
            name = match["name"]
            certain = head.sure or match["mark"] or self.tools.get(name) is not None
            # An object of the answer is a call only if it has arguments, or the name of a declared tool.
            if name and not certain and head.arguments and not head.arguments.match(text, match.end()):
                return self._wait(len(text) - match.end(), _LONGEST_BETWEEN)
            if name:
                self._told.start(name, head.identifier(match))
                self._steps = self._arguments(head)
                return match.end()
            return self._wait(1, 0)
        return self._wait(len(text), _LONGEST_HEADER)

    def _wait(self, length: int, most: int) -> int:
        """Wait for more, or leave the call to the parser where the text is too long for a usual spelling."""
        if length > most:
            self._steps = ReaderStates(self._told)
        return 0

    def _arguments(self, head: CallHeader) -> ReaderStates:
        if head.spelling is None:
            return TagStates(self._told, self.tables)
        return BracketStates(self._told, head.spelling, head.arguments)
