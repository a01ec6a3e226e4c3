"""A tool-parser plug-in for vLLM's server: every format of this library, under the name `tessera_FORMAT`.

    vllm serve MODEL --enable-auto-tool-choice --tool-parser-plugin FILE --tool-call-parser tessera_hermes

FILE is this one, and chat_tools has to be installed beside vLLM. A call is streamed as it comes: its name first, then
its arguments, whose deltas add up to the JSON text that the whole gives. In a whole answer malformed text is content,
but for a closing marker that closes nothing. The parser reads what vLLM's reasoning parser leaves over, so no block of
reasoning is open.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from vllm.entrypoints.generate.base.protocol import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
)
from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

from chat_tools.parsing.formats import FORMATS
from chat_tools.parsing.grammar import Format
from chat_tools.parsing.parser import StreamParser, parse
from chat_tools.parsing.result import ArgumentsDelta, CallStarted, Event, ParsedMessage, TextDelta, joined_text

PREFIX = "tessera_"


class FormatToolParser(ToolParser):
    """vLLM's interface over one format; vLLM makes an instance for each request (and each choice of a stream)."""

    format: ClassVar[Format]

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        super().__init__(tokenizer, tools)
        self._stream: StreamParser | None = None
        self._blank = ""  # white space that is content only if more content follows
        self._begun = False  # whether content was sent

    def adjust_request(self, request: Any) -> Any:
        """Let the format's markers through: many are special tokens, which vLLM would leave out of the text."""
        request = super().adjust_request(request)
        if request.tools and request.tool_choice != "none":
            request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        """Take a whole answer apart."""
        message = parse(model_output, self.format, self._schemas(request), prefill="")
        calls = [
            ToolCall(function=FunctionCall(name=call.name, arguments=call.arguments), **_named(call.id))
            for call in message.tool_calls
        ]
        content = self._content(message) or None
        return ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=content)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> DeltaMessage | None:
        """Take the next piece of an answer."""
        del current_text, previous_token_ids, current_token_ids, delta_token_ids
        if self._stream is None:
            self._stream = StreamParser(self.format, self._schemas(request), prefill="")
            self._stream.feed(previous_text)
        content = ""
        calls: list[DeltaToolCall] = []
        for event in self._stream.feed(delta_text):
            content += event.text if isinstance(event, TextDelta) else ""
            for call in self._told(event):
                if calls and calls[-1].index == call.index:  # one entry a call, as vLLM's own parsers give
                    calls[-1].function.arguments += call.function.arguments
                else:
                    calls.append(call)
        content = self._trimmed(content, bool(self.prev_tool_call_arr))
        if not content and not calls:
            return None
        return DeltaMessage(content=content or None, tool_calls=calls)

    def _content(self, message: ParsedMessage) -> str:
        """The content of a whole answer, with the blanks that end its last line: most parsers of vLLM do so."""
        closes = {close for _, close in (*self.format.calls, *filter(None, [self.format.section]))}
        text = message.text
        told = [  # a closing marker that closes nothing is no text
            s for s in message.segments if s.kind != "malformed" or text[s.start : s.end].strip() not in closes
        ]
        content = joined_text(text, told, ("content", "malformed"))
        every = "".join([text[s.inner_start : s.inner_end] for s in told if s.kind in ("content", "malformed")])
        blanks = every[len(every.rstrip()) :].partition("\n")[0]
        return content + blanks if content and not content[-1].isspace() else content

    def _trimmed(self, text: str, after_call: bool) -> str:
        """The content to send now: a line's end waits for more, so that a stream gives what the whole answer gives."""
        text = self._blank + text
        if after_call and not self._begun:
            text = text.lstrip()
        end = len(text.rstrip())
        if end or self._begun:
            end += len(text[end:].partition("\n")[0])
        self._blank = text[end:]
        self._begun = self._begun or end > 0
        return text[:end]

    def _schemas(self, request: Any) -> list[dict[str, Any]]:
        """The tools of the request; where it has none, those that the parser was made with."""
        tools = getattr(request, "tools", None) or self.tools or ()
        return [tool if isinstance(tool, dict) else tool.model_dump() for tool in tools]

    def _told(self, event: Event) -> list[DeltaToolCall]:
        """The delta of an event; `prev_tool_call_arr` tells vLLM which calls there were and what was sent of them."""
        if isinstance(event, CallStarted):
            self.current_tool_id = event.number
            self.prev_tool_call_arr.append({"name": event.name, "arguments": ""})
            self.streamed_args_for_tool.append("")
            function = DeltaFunctionCall(name=event.name, arguments="")
            identifier = event.id or ToolCall(function=FunctionCall(name=event.name, arguments="")).id
            return [DeltaToolCall(index=event.number, id=identifier, type="function", function=function)]
        if isinstance(event, ArgumentsDelta):
            self.streamed_args_for_tool[event.number] += event.text
            self.prev_tool_call_arr[event.number]["arguments"] = self.streamed_args_for_tool[event.number]
            return [DeltaToolCall(index=event.number, function=DeltaFunctionCall(arguments=event.text))]
        return []


def _named(identifier: str | None) -> dict[str, str]:
    """The id that the model gave a call; none where vLLM makes one of its own, new in every answer."""
    return {"id": identifier} if identifier else {}


def register() -> list[str]:
    """Register a parser for each format and return their names."""
    names = []
    for fmt in FORMATS.values():
        parser = type(f"Tessera_{fmt.name}", (FormatToolParser,), {"format": fmt})
        names.append(PREFIX + fmt.name)
        ToolParserManager.register_module(name=names[-1], module=parser)
    return names


register()
