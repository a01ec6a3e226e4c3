"""Messages to tokens and loss masks; a model's text to tool calls."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chat_tools.audit import TemplateReport as TemplateReport
    from chat_tools.audit import audit_template as audit_template
    from chat_tools.detection import detect_format as detect_format
    from chat_tools.grammar import formats as formats
    from chat_tools.media import Media as Media
    from chat_tools.media import images as images
    from chat_tools.media import videos as videos
    from chat_tools.message import Malformed as Malformed
    from chat_tools.message import ParsedMessage as ParsedMessage
    from chat_tools.message import Segment as Segment
    from chat_tools.message import ToolCall as ToolCall
    from chat_tools.parser import StreamParser as StreamParser
    from chat_tools.parser import parse as parse
    from chat_tools.rendering import Rendered as Rendered
    from chat_tools.rendering import extend as extend
    from chat_tools.rendering import render as render
    from chat_tools.tool_schema import function_schema as function_schema
    from chat_tools.view import html_view as html_view
    from chat_tools.view import terminal_view as terminal_view

_EXPORTS = {
    "Malformed": "chat_tools.message",
    "Media": "chat_tools.media",
    "ParsedMessage": "chat_tools.message",
    "Rendered": "chat_tools.rendering",
    "Segment": "chat_tools.message",
    "StreamParser": "chat_tools.parser",
    "TemplateReport": "chat_tools.audit",
    "ToolCall": "chat_tools.message",
    "audit_template": "chat_tools.audit",
    "detect_format": "chat_tools.detection",
    "extend": "chat_tools.rendering",
    "formats": "chat_tools.grammar",
    "function_schema": "chat_tools.tool_schema",
    "html_view": "chat_tools.view",
    "images": "chat_tools.media",
    "parse": "chat_tools.parser",
    "render": "chat_tools.rendering",
    "terminal_view": "chat_tools.view",
    "videos": "chat_tools.media",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)
