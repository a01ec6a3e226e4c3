"""Chat-completion requests: read and checked as a whole, refused with the name of the wrong parameter.

Nothing is silently ignored: a parameter without an effect here is a `RequestError` unless it has its neutral value, or
stands in `ChatRequest.ignored`, which the response's header and a warning name.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from rollout.chat.messages import Message
from rollout.engine import Sampling
from rollout.gateway.request_error import RequestError as RequestError
from rollout.gateway.request_error import refuse as refuse
from rollout.gateway.response_format import FORMAT, STRUCTURED, read_structured
from rollout.tools.tool import Tool

ROLES = ("system", "developer", "user", "assistant", "tool")
# Parameters that speak of OpenAI's service, or of a form that nothing here enforces; frameworks send them unasked.
IGNORED = (
    *("user", "safety_identifier", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_retention"),
    "prompt_cache_options",
    *("reasoning_effort", "verbosity", "prediction"),
)
# Parameters without effect here, with their neutral values.
IDENTITY_VALUES: Mapping[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "modalities": (["text"],),
}
READ = (
    *("model", "messages", "tools", "stream", "stream_options", "logprobs", "return_token_ids", "stop"),
    *("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("temperature", "top_p", "top_k", "seed", "max_tokens", "max_completion_tokens", "n", "tool_choice"),
    *("parallel_tool_calls", FORMAT, STRUCTURED, *IGNORED),
)
# Keys of a message that clients send back as they got them; ignored when empty.
EMPTY_KEYS = (
    "refusal",
    "annotations",
    "audio",
    "function_call",
    "tool_calls",
    "reasoning_content",
    "reasoning",
)
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_CHOICES = 128


ToolChoice = Literal["auto", "none", "required", "function"]


@dataclass(frozen=True)
class ChatRequest:
    """One checked request. `settings` are the fields of `Sampling` that it names; `stop` are texts.

    `n` completions are sampled. `tool_choice` is "auto", "none", "required", or with `function` the name of the tool to
    be called. `parallel_calls`: whether a turn may hold several calls. `ignored` names what has no effect.
    """

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    settings: Mapping[str, Any]
    stop: tuple[str, ...] = ()
    stream: bool = False
    usage: bool = False
    log_probs: bool = False
    token_ids: bool = False
    n: int = 1
    tool_choice: ToolChoice = "auto"
    function: str | None = None
    parallel_calls: bool = True
    ignored: tuple[str, ...] = ()

    @property
    def may_call(self) -> bool:
        """Whether a call in the text counts as one: without tools, or with tool_choice "none", it is text."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forces_call(self) -> bool:
        """Whether the completion has to begin with a call."""
        return self.tool_choice in ("required", "function")

    def without_structured(self) -> "ChatRequest":
        """Return the request with its structured outputs among what is ignored."""
        if STRUCTURED not in self.settings:
            return self
        settings = {name: value for name, value in self.settings.items() if name != STRUCTURED}
        return replace(self, settings=settings, ignored=(*self.ignored, FORMAT))

    def sampling(self, default: Sampling) -> Sampling:
        """Return `default` with the request's own settings; a temperature of 0 is greedy."""
        settings = dict(self.settings)
        if settings.get("temperature") == 0:
            del settings["temperature"]
            limit = settings.get("max_new_tokens", default.max_new_tokens)
            others = {name: value for name, value in settings.items() if name.endswith("_penalty")}
            others[STRUCTURED] = settings.get(STRUCTURED, default.structured_outputs)
            return Sampling(
                greedy=True, max_new_tokens=limit, stop_token_ids=default.stop_token_ids, stop=default.stop, **others
            )
        if default.greedy and settings.keys() - {"max_new_tokens"}:
            settings["greedy"] = False
        try:
            return replace(default, **settings)
        except ValueError as error:
            refuse(str(error))


def read_json(body: bytes) -> Any:
    """Parse a body as JSON. Raise RequestError for other text, NaN and infinities, and for nesting that is too deep."""
    try:
        value = json.loads(body, parse_constant=_no_constant)
        if b"\\u" in body:  # an escape may be half of a surrogate pair, which is no text
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        refuse(f"the body is not valid JSON: {error}")
    return value


def read_request(body: Any, model: str) -> ChatRequest:
    """Return the request in a decoded body. Raise RequestError (400, or 404 for another model) with the parameter."""
    if not isinstance(body, dict):
        refuse(f"the body must be a JSON object, got {type(body).__name__}")
    parameters = {name: value for name, value in body.items() if value is not None}
    for name in parameters.keys() - set(READ):
        if name not in IDENTITY_VALUES:
            refuse(f"the parameter {name!r} is not supported: leave it out", name, "unsupported_parameter")
        if name == "top_logprobs" and parameters[name] != 0:
            why = "top_logprobs is not supported: engines tell the log-prob of the sampled token alone"
            refuse(why, name, "unsupported_parameter")
        if parameters[name] not in IDENTITY_VALUES[name]:
            wanted = " or ".join(map(json.dumps, IDENTITY_VALUES[name]))
            refuse(f"{name!r} is not supported other than as {wanted}", name, "unsupported_parameter")
    if _text(parameters, "model") != model:
        raise RequestError(
            404, f"there is no model {parameters['model']!r}; this server has {model!r}", "model", "model_not_found"
        )
    options = parameters.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        refuse("stream_options takes include_usage alone", "stream_options", "unsupported_parameter")
    if options and not parameters.get("stream"):
        refuse("stream_options needs stream=true", "stream_options")
    tools = _tools(parameters.get("tools", []))
    choice, function = _tool_choice(parameters.get("tool_choice"), tools)
    messages = read_messages(parameters.get("messages"))
    named = any(message.get("name") and message["role"] != "tool" for message in parameters["messages"])
    strict = any(tool["function"].get("strict") for tool in parameters.get("tools", []))
    ignored = [name for name in IGNORED if parameters.get(name) not in (None, False, {}, {"type": "text"})]
    ignored += ["tools.strict"] * strict + ["messages.name"] * named
    request = ChatRequest(
        model=model,
        messages=messages,
        tools=tools,
        settings=_settings(parameters),
        stop=_stops(parameters.get("stop", [])),
        stream=read_flag(parameters, "stream"),
        usage=read_flag(options, "include_usage"),
        log_probs=read_flag(parameters, "logprobs"),
        token_ids=read_flag(parameters, "return_token_ids"),
        n=int(_number(parameters, "n", (int,), 1, MAX_CHOICES)) if "n" in parameters else 1,
        tool_choice=choice,
        function=function,
        parallel_calls=parameters.get("parallel_tool_calls") is None or read_flag(parameters, "parallel_tool_calls"),
        ignored=tuple(ignored),
    )
    return request.without_structured() if request.may_call else request


def read_messages(given: Any) -> tuple[Message, ...]:
    """Return messages as templates need them: text contents, parsed arguments, tool messages with the tool's name."""
    if not isinstance(given, list) or not given:
        refuse("messages must be a list of at least one message", "messages")
    messages: list[Message] = []
    names: dict[str, str] = {}
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            refuse(f"{where} must be an object, got {type(message).__name__}", where)
        if message.get("role") not in ROLES:
            refuse(f"{where}.role is one of {', '.join(ROLES)}, got {message.get('role')!r}", f"{where}.role")
        role = "system" if message["role"] == "developer" else message["role"]
        messages.append(read_message({**message, "role": role}, where, names))
    if messages[-1]["role"] == "assistant":
        refuse(
            "the last message is the assistant's: an answer follows a user's, a tool's or a system message", "messages"
        )
    return tuple(messages)


def read_message(message: Mapping[str, Any], where: str, names: dict[str, str]) -> Message:
    """Return one message. `names` maps the ids of earlier calls to their tools, and gets the message's own calls."""
    role = message["role"]
    read: dict[str, Any] = {"role": role, "content": _content(message.get("content"), f"{where}.content")}
    allowed = {"role", "content"}
    if role == "assistant":
        allowed |= {"tool_calls", "reasoning_content", "reasoning"}
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if reasoning:
            if not isinstance(reasoning, str):
                refuse(f"{where}.reasoning_content must be text", f"{where}.reasoning_content")
            read["reasoning_content"] = reasoning
        calls = _calls(message.get("tool_calls") or [], f"{where}.tool_calls")
        if calls:
            read["tool_calls"] = calls
            names.update((call["id"], call["function"]["name"]) for call in calls)
    elif role == "tool":
        allowed |= {"tool_call_id", "name"}
        call_id = message.get("tool_call_id")
        if not isinstance(call_id, str) or call_id not in names:
            refuse(f"{where}.tool_call_id {call_id!r} is the id of no call before it", f"{where}.tool_call_id")
        read |= {"tool_call_id": call_id, "name": names[call_id]}
    for key, value in message.items():
        if key not in allowed and key != "name" and not (key in EMPTY_KEYS and not value):
            refuse(f"{where}.{key} is not supported: leave it out", f"{where}.{key}", "unsupported_parameter")
    return read


def _content(content: Any, where: str) -> str | list[dict[str, str]]:
    """Return the text of a content; its parts where one is an image. Raise RequestError for other media."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        refuse(f"{where} must be text or a list of parts", where)
    parts = [_part(part, f"{where}[{index}]") for index, part in enumerate(content)]
    return parts if any("image" in part for part in parts) else "".join(part["text"] for part in parts)


def _part(part: Any, where: str) -> dict[str, str]:
    """Return a text, or an image, as `Chat` has them."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if kind != "image_url":
        refuse(f"{where} is {kind!r}: parts of text and image_url are supported", where)
    given = part.get("image_url")
    return {"type": "image", "image": read_image_url(given.get("url") if isinstance(given, dict) else None, where)}


def read_image_url(url: Any, where: str) -> str:
    """Return the address of an image, which holds the image itself: the gateway opens no file and no address."""
    if not isinstance(url, str) or not url.startswith("data:image/"):
        refuse(f"{where} must hold its image as a data: URI, got {url!r:.80}: nothing is fetched here", where)
    return url


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        refuse(f"{where} must be a list", where)
    read = []
    for index, call in enumerate(calls):
        at = f"{where}[{index}]"
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            refuse(f"{at} must be a call of a function", at)
        name, arguments = _text(function, "name", at), _text(function, "arguments", at)
        read.append(
            {
                "id": _text(call, "id", at),
                "type": "function",
                "function": {"name": name, "arguments": read_arguments(arguments)},
            }
        )
    return read


def read_arguments(arguments: str) -> Any:
    """Return a call's arguments as an object, which templates iterate over; the text itself where it is none."""
    try:
        value = json.loads(arguments, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _tools(given: Any) -> tuple[Tool, ...]:
    if not isinstance(given, list):
        refuse("tools must be a list", "tools")
    tools = []
    for index, tool in enumerate(given):
        at = f"tools[{index}]"
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function":
            refuse(f"{at} must be a function", at)
        for key, value in function.items():
            if key not in ("name", "description", "parameters", "strict") and value:
                refuse(
                    f"{at}.function.{key} is not supported: leave it out",
                    f"{at}.function.{key}",
                    "unsupported_parameter",
                )
        parameters = function.get("parameters") or {"type": "object", "properties": {}}
        if not isinstance(parameters, dict) or not isinstance(function.get("description") or "", str):
            refuse(f"{at}.function: description must be text and parameters a JSON schema", f"{at}.function")
        try:
            tools.append(Tool(_text(function, "name", at), function.get("description") or "", parameters, _elsewhere))
        except ValueError as error:
            refuse(str(error), f"{at}.function.parameters")
    return tuple(tools)


def _tool_choice(given: Any, tools: Sequence[Tool]) -> tuple[ToolChoice, str | None]:
    """Return the tool choice: one of three words, or "function" and the tool's name."""
    if given is None or given == "auto" or given == "none":
        return given or "auto", None
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    if given != "required" and not isinstance(function, dict):
        words = 'tool_choice is "auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
        refuse(f"{words}, got {json.dumps(given)}", "tool_choice", "unsupported_parameter")
    if not tools:
        refuse("tool_choice asks for a call, and no tools are offered", "tool_choice")
    if function is None:
        return "required", None
    name = _text(function, "name", "tool_choice.function")
    if all(tool.name != name for tool in tools):
        refuse(f"tool_choice names {name!r}, which is none of the tools", "tool_choice")
    return "function", name


def _elsewhere(**arguments: Any) -> NoReturn:
    raise NotImplementedError(f"the agent runs its tools itself, not the gateway; called with {sorted(arguments)}")


def _settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Sampling` that a request names."""
    settings: dict[str, Any] = {}
    bounds = {"temperature": (0.0, 100.0), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0)}
    bounds |= {"presence_penalty": (-2.0, 2.0), "frequency_penalty": (-2.0, 2.0), "repetition_penalty": (1e-3, 1e3)}
    for name, (least, most) in bounds.items():
        if name in given:
            settings[name] = _number(given, name, (int, float), least, most)
    if "top_p" in settings and settings["top_p"] == 0:
        refuse("top_p must lie in (0, 1]; for the likeliest token say temperature=0", "top_p")
    if "top_k" in given:
        settings["top_k"] = max(0, int(_number(given, "top_k", (int,), -1, 2**31)))
    if "seed" in given:
        settings["seed"] = int(_number(given, "seed", (int,), -(2**63), 2**63 - 1))
    limits = [name for name in ("max_completion_tokens", "max_tokens") if name in given]
    if len(limits) == 2 and given["max_tokens"] != given["max_completion_tokens"]:
        refuse("max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
    if wanted := read_structured(given):
        settings[STRUCTURED] = wanted
    if limits:
        settings["max_new_tokens"] = int(_number(given, limits[0], (int,), 1, 2**31))
    return settings


def _stops(given: Any) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > MAX_STOPS or not all(isinstance(s, str) and s for s in stops):
        refuse(f"stop must be a text or a list of at most {MAX_STOPS} texts, none of them empty", "stop")
    if any(len(stop) > MAX_STOP_CHARACTERS for stop in stops):
        refuse(f"a stop text has at most {MAX_STOP_CHARACTERS} characters", "stop")
    return tuple(stops)


def _number(given: Mapping[str, Any], name: str, kinds: tuple[type, ...], least: float, most: float) -> Any:
    value: Any = given[name]
    if isinstance(value, bool) or type(value) not in kinds or not least <= value <= most:
        kind = "a whole number" if kinds == (int,) else "a number"
        refuse(f"{name} must be {kind} from {least:g} to {most:g}, got {value!r}", name)
    return value


def read_flag(given: Mapping[str, Any], name: str) -> bool:
    """Return a parameter that is true or false; false where it is not given."""
    value = given.get(name, False)
    if not isinstance(value, bool):
        refuse(f"{name} must be true or false, got {value!r}", name)
    return value


def _text(given: Mapping[str, Any], name: str, where: str = "") -> str:
    value = given.get(name)
    at = f"{where}.{name}" if where else name
    if not isinstance(value, str):
        refuse(f"{at} must be text, got {value!r}", at)
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def tools_key(tools: Sequence[Tool]) -> str:
    """Return the tools of a conversation as one text, which is equal for equal tools."""
    return json.dumps([tool.schema for tool in tools], sort_keys=True)
