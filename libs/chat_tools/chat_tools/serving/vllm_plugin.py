"""A tool-parser plug-in for vLLM's server: every format of this library, under the name `tessera_FORMAT`.

    vllm serve MODEL --enable-auto-tool-choice --tool-parser-plugin FILE --tool-call-parser tessera_hermes

FILE is this one, and chat_tools has to be installed beside vLLM. A call is streamed as it comes: its name first, then
its arguments, whose deltas add up to the JSON text that the whole gives. Malformed text is content, and a stream says
what the whole answer says (answer_content.py). What was told of a call that breaks off cannot be taken back: it stays
with the client, and its arguments are no JSON. The parser reads what vLLM's reasoning parser leaves over; without one
(`--reasoning-parser`) thoughts are content with their markers, as vLLM has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from vllm.tool_parsers.abstract_tool_parser import ToolParser, ToolParserManager

from chat_tools.known_formats.grammar import Format
from chat_tools.parsing.formats import FORMATS
from chat_tools.parsing.parser import StreamParser
from chat_tools.parsing.result import ArgumentsDelta, CallStarted, Event
from chat_tools.serving.answer_content import AnswerContent

try:
    from vllm.entrypoints.generate.base import protocol
except ModuleNotFoundError:
    try:  # vLLM 0.26
        from vllm.entrypoints.openai.engine import protocol
    except ModuleNotFoundError as error:
        raise ImportError(
            "this vLLM keeps its messages where neither 0.32 nor 0.26 does: install a version between these "
            "(pip install vllm==0.32.0), with which the plug-in was tried"
        ) from error

PREFIX = "tessera_"


class FormatToolParser(ToolParser):
    """vLLM's interface over one format; vLLM makes an instance for each request (and each choice of a stream)."""

    format: ClassVar[Format]

    def __init__(self, tokenizer: Any, tools: Any = None) -> None:
        super().__init__(tokenizer, tools)
        self._stream: StreamParser | None = None
        self._content: AnswerContent | None = None

    def adjust_request(self, request: Any) -> Any:
        """Keep the format's markers in the text: many are special tokens, which vLLM would leave out."""
        request = super().adjust_request(request)
        if request.tools and request.tool_choice != "none":
            request.skip_special_tokens = False
        return request

    def extract_tool_calls(self, model_output: str, request: Any) -> Any:
        """Parse a whole answer into vLLM's `ExtractedToolCallInformation`."""
        stream = self._begin(request)
        content = AnswerContent(self.format, stream)
        stream.feed(model_output)
        message = stream.finish()
        calls = [
            protocol.ToolCall(
                function=protocol.FunctionCall(name=call.name, arguments=call.arguments), **_named(call.id)
            )
            for call in message.tool_calls
        ]
        text = content.settled(model_output) if calls else model_output
        return protocol.ExtractedToolCallInformation(tools_called=bool(calls), tool_calls=calls, content=text or None)

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        previous_token_ids: Sequence[int],
        current_token_ids: Sequence[int],
        delta_token_ids: Sequence[int],
        request: Any,
    ) -> Any:
        """Parse the next piece of an answer; return vLLM's `DeltaMessage`, or None where nothing is certain yet."""
        del current_text, previous_token_ids, current_token_ids, delta_token_ids
        if self._stream is None or self._content is None:
            self._stream = self._begin(request)
            self._content = AnswerContent(self.format, self._stream)
            self._stream.feed(previous_text)
            self._content.settled(previous_text)
            # vLLM asks such parsers alone for the end of a stream. One that is so from the beginning is given no
            # earlier text, without which vLLM cannot stream the calls of `tool_choice="required"`.
            self.engine_based_streaming = True
        events = self._stream.feed(delta_text)
        return self._delta(self._content.settled(delta_text), events)

    def finish_streaming(self) -> Any:
        """End the answer, and return the text that was held back."""
        if self._stream is None or self._content is None:
            return None
        self._stream.finish()
        return self._delta(self._content.settled() + self._content.rest(), self._stream.last_events())

    def _begin(self, request: Any) -> StreamParser:
        """Return a parser with the tools of the request; if it has none, with those of this object."""
        tools = getattr(request, "tools", None) or self.tools or ()
        schemas = [tool if isinstance(tool, dict) else tool.model_dump() for tool in tools]
        return StreamParser(self.format, schemas, prefill="")

    def _delta(self, content: str, events: Iterable[Event]) -> Any:
        calls: list[Any] = []
        for event in events:
            call = self._told(event)
            if call is not None and calls and calls[-1].index == call.index:  # one entry a call, as vLLM's parsers give
                calls[-1].function.arguments += call.function.arguments
            elif call is not None:
                calls.append(call)
        return protocol.DeltaMessage(content=content or None, tool_calls=calls) if content or calls else None

    def _told(self, event: Event) -> Any:
        """Return the delta of an event; `prev_tool_call_arr` holds the calls and their sent parts for vLLM."""
        if isinstance(event, CallStarted):
            self.current_tool_id = event.number
            self.prev_tool_call_arr.append({"name": event.name, "arguments": ""})
            self.streamed_args_for_tool.append("")
            function = protocol.DeltaFunctionCall(name=event.name, arguments="")
            made = protocol.ToolCall(function=protocol.FunctionCall(name=event.name, arguments="")).id
            return protocol.DeltaToolCall(index=event.number, id=event.id or made, type="function", function=function)
        if isinstance(event, ArgumentsDelta):
            self.streamed_args_for_tool[event.number] += event.text
            self.prev_tool_call_arr[event.number]["arguments"] = self.streamed_args_for_tool[event.number]
            function = protocol.DeltaFunctionCall(arguments=event.text)
            return protocol.DeltaToolCall(index=event.number, function=function)
        return None


def _named(identifier: str | None) -> dict[str, str]:
    """Return the id that the model gave a call; none where vLLM makes a new one in every answer."""
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
