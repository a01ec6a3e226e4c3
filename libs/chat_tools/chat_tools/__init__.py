"""Messages to tokens and loss masks; a model's text to tool calls."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chat_tools.grammar import formats as formats
    from chat_tools.message import ParsedMessage as ParsedMessage
    from chat_tools.message import ToolCall as ToolCall
    from chat_tools.parser import StreamParser as StreamParser
    from chat_tools.parser import parse as parse
    from chat_tools.rendering import Rendered as Rendered
    from chat_tools.rendering import extend as extend
    from chat_tools.rendering import render as render

_EXPORTS = {
    "ParsedMessage": "chat_tools.message",
    "Rendered": "chat_tools.rendering",
    "StreamParser": "chat_tools.parser",
    "ToolCall": "chat_tools.message",
    "extend": "chat_tools.rendering",
    "formats": "chat_tools.grammar",
    "parse": "chat_tools.parser",
    "render": "chat_tools.rendering",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)
