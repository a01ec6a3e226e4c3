"""A turn's text as the parts of OpenAI's message: chat_tools' parser, with each of the gateway's calls whole."""

from collections.abc import Callable, Sequence
from typing import Any

from chat_tools import Format
from chat_tools.serving import turn_message
from chat_tools.serving.turn_message import Delta as Delta


class TurnMessage(turn_message.TurnMessage):
    """Parser of one turn's text into the deltas of its message; a call is sent when it is whole.

    `prefill` is what the prompt holds of the turn. `number` returns the numbers of calls, by which those that bring no
    id get one. Without `may_call` a call is text.
    """

    def __init__(
        self,
        tool_format: str | Format,
        tools: Sequence[Any],
        prefill: str,
        *,
        may_call: bool,
        number: Callable[[], int],
    ) -> None:
        super().__init__(tool_format, tools, prefill=prefill, may_call=may_call, number=number, early=False)
