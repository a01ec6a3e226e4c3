"""Reading the arguments of a call that is not complete, state by state."""

from __future__ import annotations

from collections.abc import Callable

from chat_tools.parsing.streamed_call import StreamedCall

LONGEST_TAG = 600


class ReaderStates:
    """States that read the text from a place on and emit what is certain of it.

    `state` takes what there is (never nothing) and returns how many characters it has read; 0 waits for more, or has
    changed the state. In the state `stop` nothing more is emitted before the parser has the call.
    """

    def __init__(self, stream_call: StreamedCall) -> None:
        self.stream_call = stream_call
        self.state: Callable[[str], int] = self.stop

    def stop(self, text: str) -> int:
        """Wait for the parser."""
        del text
        return 0

    def wait(self, text: str) -> int:
        """Wait for more of a text that is usually short; stop where it is long."""
        if len(text) > LONGEST_TAG:
            self.state = self.stop
        return 0
