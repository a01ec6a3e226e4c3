"""Messages of a conversation, and an assistant turn that was read from its tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.tools.tool import ToolCall

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Reply:
    """One assistant turn, parsed. `problems` are the reasons why parts of it could not be parsed as tool calls.

    `text` is everything the model wrote, `content` what remains for the user, `reasoning` its thinking. `finished` is
    False when a limit cut the turn off.
    """

    text: str
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    problems: tuple[str, ...] = ()
    finished: bool = True
