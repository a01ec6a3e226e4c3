"""Messages to tokens and loss masks; a model's text to tool calls."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from chat_tools.known_formats.grammar import Channels as Channels
    from chat_tools.known_formats.grammar import Elements as Elements
    from chat_tools.known_formats.grammar import Format as Format
    from chat_tools.known_formats.grammar import Json as Json
    from chat_tools.known_formats.grammar import Pythonic as Pythonic
    from chat_tools.known_formats.grammar import Tagged as Tagged
    from chat_tools.parsing.formats import find_format as find_format
    from chat_tools.parsing.formats import formats as formats
    from chat_tools.parsing.openai import delta_of as delta_of
    from chat_tools.parsing.openai import from_openai as from_openai
    from chat_tools.parsing.openai import to_openai as to_openai
    from chat_tools.parsing.parser import StreamParser as StreamParser
    from chat_tools.parsing.parser import parse as parse
    from chat_tools.parsing.result import ArgumentsDelta as ArgumentsDelta
    from chat_tools.parsing.result import CallDropped as CallDropped
    from chat_tools.parsing.result import CallFinished as CallFinished
    from chat_tools.parsing.result import CallStarted as CallStarted
    from chat_tools.parsing.result import Malformed as Malformed
    from chat_tools.parsing.result import MalformedFound as MalformedFound
    from chat_tools.parsing.result import ParsedMessage as ParsedMessage
    from chat_tools.parsing.result import Retracted as Retracted
    from chat_tools.parsing.result import Segment as Segment
    from chat_tools.parsing.result import TextDelta as TextDelta
    from chat_tools.parsing.result import ToolCall as ToolCall
    from chat_tools.parsing.tool_schema import function_schema as function_schema
    from chat_tools.rendering.audit import TemplateReport as TemplateReport
    from chat_tools.rendering.audit import audit_template as audit_template
    from chat_tools.rendering.continuation import extend as extend
    from chat_tools.rendering.continuation import text_after_turn as text_after_turn
    from chat_tools.rendering.format_detection import detect_format as detect_format
    from chat_tools.rendering.media import Media as Media
    from chat_tools.rendering.media import images as images
    from chat_tools.rendering.media import videos as videos
    from chat_tools.rendering.render import OwnedText as OwnedText
    from chat_tools.rendering.render import Rendered as Rendered
    from chat_tools.rendering.render import Renderer as Renderer
    from chat_tools.rendering.render import render as render
    from chat_tools.rendering.stop_tokens import read_stop_tokens as read_stop_tokens
    from chat_tools.rendering.stop_tokens import turn_ends as turn_ends
    from chat_tools.rendering.training import loss_weights as loss_weights
    from chat_tools.rendering.training import reasoning_format as reasoning_format
    from chat_tools.rendering.training import reasoning_mask as reasoning_mask
    from chat_tools.rendering.training import with_end as with_end
    from chat_tools.rendering.view import html_view as html_view
    from chat_tools.rendering.view import terminal_view as terminal_view
    from chat_tools.sampled_turn import parse_ids as parse_ids
    from chat_tools.serving.turn_message import TurnMessage as TurnMessage

_EXPORTS = {
    "ArgumentsDelta": "chat_tools.parsing.result",
    "CallDropped": "chat_tools.parsing.result",
    "CallFinished": "chat_tools.parsing.result",
    "CallStarted": "chat_tools.parsing.result",
    "Channels": "chat_tools.known_formats.grammar",
    "Elements": "chat_tools.known_formats.grammar",
    "Format": "chat_tools.known_formats.grammar",
    "Json": "chat_tools.known_formats.grammar",
    "Malformed": "chat_tools.parsing.result",
    "MalformedFound": "chat_tools.parsing.result",
    "Media": "chat_tools.rendering.media",
    "OwnedText": "chat_tools.rendering.render",
    "ParsedMessage": "chat_tools.parsing.result",
    "Pythonic": "chat_tools.known_formats.grammar",
    "Rendered": "chat_tools.rendering.render",
    "Renderer": "chat_tools.rendering.render",
    "Retracted": "chat_tools.parsing.result",
    "Segment": "chat_tools.parsing.result",
    "StreamParser": "chat_tools.parsing.parser",
    "Tagged": "chat_tools.known_formats.grammar",
    "TemplateReport": "chat_tools.rendering.audit",
    "TextDelta": "chat_tools.parsing.result",
    "ToolCall": "chat_tools.parsing.result",
    "TurnMessage": "chat_tools.serving.turn_message",
    "audit_template": "chat_tools.rendering.audit",
    "delta_of": "chat_tools.parsing.openai",
    "detect_format": "chat_tools.rendering.format_detection",
    "extend": "chat_tools.rendering.continuation",
    "find_format": "chat_tools.parsing.formats",
    "formats": "chat_tools.parsing.formats",
    "from_openai": "chat_tools.parsing.openai",
    "function_schema": "chat_tools.parsing.tool_schema",
    "html_view": "chat_tools.rendering.view",
    "images": "chat_tools.rendering.media",
    "loss_weights": "chat_tools.rendering.training",
    "parse": "chat_tools.parsing.parser",
    "parse_ids": "chat_tools.sampled_turn",
    "read_stop_tokens": "chat_tools.rendering.stop_tokens",
    "reasoning_format": "chat_tools.rendering.training",
    "reasoning_mask": "chat_tools.rendering.training",
    "render": "chat_tools.rendering.render",
    "terminal_view": "chat_tools.rendering.view",
    "text_after_turn": "chat_tools.rendering.continuation",
    "to_openai": "chat_tools.parsing.openai",
    "turn_ends": "chat_tools.rendering.stop_tokens",
    "videos": "chat_tools.rendering.media",
    "with_end": "chat_tools.rendering.training",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted(_EXPORTS)
