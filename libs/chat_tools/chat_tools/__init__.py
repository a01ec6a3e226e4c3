"""Messages to tokens and loss masks; a model's text to tool calls."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chat_tools.parsing.detection import detect_format as detect_format
    from chat_tools.parsing.formats import formats as formats
    from chat_tools.parsing.parser import StreamParser as StreamParser
    from chat_tools.parsing.parser import parse as parse
    from chat_tools.parsing.result import Malformed as Malformed
    from chat_tools.parsing.result import ParsedMessage as ParsedMessage
    from chat_tools.parsing.result import Segment as Segment
    from chat_tools.parsing.result import ToolCall as ToolCall
    from chat_tools.parsing.tool_schema import function_schema as function_schema
    from chat_tools.rendering.audit import TemplateReport as TemplateReport
    from chat_tools.rendering.audit import audit_template as audit_template
    from chat_tools.rendering.continuation import extend as extend
    from chat_tools.rendering.media import Media as Media
    from chat_tools.rendering.media import images as images
    from chat_tools.rendering.media import videos as videos
    from chat_tools.rendering.render import OwnedText as OwnedText
    from chat_tools.rendering.render import Rendered as Rendered
    from chat_tools.rendering.render import render as render
    from chat_tools.rendering.stop_tokens import read_stop_tokens as read_stop_tokens
    from chat_tools.rendering.view import html_view as html_view
    from chat_tools.rendering.view import terminal_view as terminal_view

_EXPORTS = {
    "Malformed": "chat_tools.parsing.result",
    "Media": "chat_tools.rendering.media",
    "OwnedText": "chat_tools.rendering.render",
    "ParsedMessage": "chat_tools.parsing.result",
    "Rendered": "chat_tools.rendering.render",
    "Segment": "chat_tools.parsing.result",
    "StreamParser": "chat_tools.parsing.parser",
    "TemplateReport": "chat_tools.rendering.audit",
    "ToolCall": "chat_tools.parsing.result",
    "audit_template": "chat_tools.rendering.audit",
    "detect_format": "chat_tools.parsing.detection",
    "extend": "chat_tools.rendering.continuation",
    "formats": "chat_tools.parsing.formats",
    "function_schema": "chat_tools.parsing.tool_schema",
    "html_view": "chat_tools.rendering.view",
    "images": "chat_tools.rendering.media",
    "parse": "chat_tools.parsing.parser",
    "read_stop_tokens": "chat_tools.rendering.stop_tokens",
    "render": "chat_tools.rendering.render",
    "terminal_view": "chat_tools.rendering.view",
    "videos": "chat_tools.rendering.media",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)
