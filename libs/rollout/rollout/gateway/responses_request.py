"""Requests of the Responses API, as the chat completions that they mean.

The policy's turn is several items there: reasoning, a message, calls. They are one assistant message here, so that a
conversation that comes back is found by the same keys as one of chat completions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout.gateway.chat_request import ChatRequest, read_flag, read_image_url, read_request, refuse

# Parameters that mean the same under these names of chat completions.
_SAME = {
    "model": "model", "stream": "stream", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
    "seed": "seed", "max_output_tokens": "max_completion_tokens", "parallel_tool_calls": "parallel_tool_calls",
}  # fmt: skip
# Parameters that speak of OpenAI's service, or of a form that nothing here enforces.
IGNORED = (
    *("user", "safety_identifier", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    "prompt_cache_options",
    *("reasoning", "text", "truncation", "stream_options"),
)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "truncation": ("disabled",), "text": ({},), "metadata": ({},), "reasoning": ({},),
}  # fmt: skip
# Parameters without effect here, with their neutral values.
_IDENTITY: Mapping[str, tuple[Any, ...]] = {"background": (False,), "top_logprobs": (0,)}
_READ = ("input", "instructions", "tools", "tool_choice", "previous_response_id", "store", "include")
_ENCRYPTED = "reasoning.encrypted_content"  # the one `include` that is taken: there is none, as of reasoning in plain
_ITEMS = "message, function_call, function_call_output and reasoning"


@dataclass(frozen=True)
class ResponsesRequest:
    """A request, read: `chat` is what is sampled; `body` what was sent.

    `messages` are those of the conversation without the instructions, as chat completions have them: with the answer
    they are what a later request goes on from.
    """

    chat: ChatRequest
    body: Mapping[str, Any]
    messages: tuple[Mapping[str, Any], ...]

    @property
    def is_stored(self) -> bool:
        """Whether later requests may name its response."""
        return self.body.get("store") is not False


def read_responses_request(
    body: Any, model: str, stored: Mapping[str, Sequence[Mapping[str, Any]]]
) -> ResponsesRequest:
    """Return the request in a decoded body; `stored` has the messages of earlier responses.

    Raises RequestError (400, or 404 for another model) with the parameter.
    """
    if not isinstance(body, dict):
        refuse(f"the body must be a JSON object, got {type(body).__name__}")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in (*_SAME, *IGNORED, *_READ) and value not in _IDENTITY.get(name, ()):
            refuse(f"the parameter {name!r} is not supported: leave it out", name, "unsupported_parameter")
    included = given.get("include", [])
    if not isinstance(included, list) or set(map(str, included)) - {_ENCRYPTED}:
        refuse(f"include takes {_ENCRYPTED} alone", "include", "unsupported_parameter")
    read_flag(given, "store")
    before = given.get("previous_response_id")
    if before is not None and before not in stored:
        text = f"there is no response {before!r} in this session, or it was not stored"
        refuse(text, "previous_response_id", "previous_response_not_found")
    messages = (*(stored[before] if before is not None else ()), *read_items(given.get("input", [])))
    chat = {name: given[own] for own, name in _SAME.items() if own in given}
    chat["tools"] = _tools(given.get("tools", []))
    chat["tool_choice"] = _tool_choice(given.get("tool_choice"))
    asked = given.get("text")
    if isinstance(asked, dict) and isinstance(form := asked.get("format"), dict):
        chat["response_format"] = _format(form)
        asked = {name: value for name, value in asked.items() if name != "format" and value is not None}
    instructions = given.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        refuse("instructions must be text", "instructions")
    chat["messages"] = [*([{"role": "system", "content": instructions}] if instructions else []), *messages]
    without = {**given, "text": asked or {}}
    ignored = [n for n in IGNORED if n in without and without[n] not in _NEUTRAL.get(n, ())]
    read = read_request(chat, model)
    names = tuple(dict.fromkeys([*ignored, *read.ignored, *(["include"] if included else [])]))
    return ResponsesRequest(replace(read, ignored=names), given, messages)


def read_items(given: Any) -> list[dict[str, Any]]:
    """Return the messages of an input: a text, or items. Items of one assistant turn are one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        refuse("input must be text or a list of items", "input")
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        where = f"input[{index}]"
        if not isinstance(item, dict):
            refuse(f"{where} must be an object, got {type(item).__name__}", where)
        kind = item.get("type", "message")
        if kind == "function_call_output":
            content = _texts(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind == "message" and item.get("role") != "assistant":
            messages.append({"role": item.get("role"), "content": _content(item.get("content"), f"{where}.content")})
        elif kind in ("message", "function_call", "reasoning"):
            _add_to_turn(messages, kind, item, where)
        else:
            refuse(f"{where} is {kind!r}: items of {_ITEMS} are supported", where, "unsupported_parameter")
    return messages


def _add_to_turn(messages: list[dict[str, Any]], kind: str, item: Mapping[str, Any], where: str) -> None:
    """Add an item to the assistant turn at the end; begin another where that one has such an item already."""
    turn = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    key = {"message": "content", "reasoning": "reasoning_content", "function_call": "tool_calls"}[kind]
    if turn is None or (kind == "message" and key in turn) or (kind == "reasoning" and len(turn) > 1):
        turn = {"role": "assistant"}
        messages.append(turn)
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        turn.setdefault(key, []).append({"id": item.get("call_id"), "type": "function", "function": function})
    elif kind == "message":
        turn[key] = _texts(item.get("content"), f"{where}.content")
    else:
        text = _texts(item.get("content") or item.get("summary") or [], f"{where}.content")
        if text:
            turn[key] = text


def _content(given: Any, where: str) -> Any:
    """Return the content of a message as chat completions have it. Raise RequestError for media but images."""
    kinds = [part.get("type") for part in given if isinstance(part, dict)] if isinstance(given, list) else []
    if "input_image" not in kinds:
        return _texts(given, where)
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(given):
        if isinstance(part, dict) and part.get("type") == "input_image":
            url = read_image_url(part.get("image_url"), f"{where}[{index}]")
            parts.append({"type": "image_url", "image_url": {"url": url}})
        else:
            parts.append({"type": "text", "text": _texts([part], f"{where}, from part {index}")})
    return parts


def _texts(given: Any, where: str) -> str:
    """Return the text of parts. Raise RequestError for media."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        refuse(f"{where} must be text or a list of parts", where)
    for index, part in enumerate(given):
        kinds = ("input_text", "output_text", "reasoning_text", "summary_text", "text")
        if not isinstance(part, dict) or part.get("type") not in kinds or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            refuse(f"{where}[{index}] is {kind!r}: parts of text alone are supported", f"{where}[{index}]")
    return "".join(part["text"] for part in given)


def _tools(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list):
        refuse("tools must be a list", "tools")
    tools = []
    for index, tool in enumerate(given):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
            refuse(f"tools[{index}] is {kind!r}: functions alone are supported", f"tools[{index}]")
        function = {name: value for name, value in tool.items() if name != "type" and value is not None}
        tools.append({"type": "function", "function": function})
    return tools


def _format(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the format of a text as chat completions have it."""
    kind, schema = given.get("type"), {name: value for name, value in given.items() if name != "type"}
    return {"type": kind, "json_schema": schema} if kind == "json_schema" else {"type": kind, **schema}


def _tool_choice(given: Any) -> Any:
    if isinstance(given, dict) and given.get("type") == "function":
        return {"type": "function", "function": {"name": given.get("name")}}
    return given
