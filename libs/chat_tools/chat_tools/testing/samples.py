"""Well-formed turns in every format, written from a list of calls: for round trips, agreement and speed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from chat_tools.parsing.formats import Channels, Format, Json, Pythonic, Tagged, find_format

Call = tuple[str, Mapping[str, Any]]
_REASONING = {"gemma": ("<|channel>thought\n", "<channel|>")}


def write_turn(name: str, calls: Sequence[Call], content: str = "", reasoning: str = "") -> str:
    """Write a turn as a model trained on the format would."""
    fmt = find_format(name)
    if isinstance(fmt.body, Channels):
        return _channels(fmt.body, calls, content, reasoning)
    text = ""
    if reasoning:
        opening, closing = _REASONING.get(fmt.name, fmt.reasoning[0])
        text += f"{opening}\n{reasoning}\n{closing}\n\n"
    text += content
    if calls:
        text += ("\n\n" if content else "") + write_calls(fmt, calls)
    return text


def write_calls(fmt: Format, calls: Sequence[Call]) -> str:
    """Write calls, with the wrapper around them."""
    if isinstance(fmt.body, Pythonic):
        return "[" + ", ".join(_python(name, arguments) for name, arguments in calls) + "]"
    if fmt.opening == "{":
        return "; ".join(json.dumps({"name": n, "parameters": a}, ensure_ascii=False) for n, a in calls)
    if fmt.name == "granite":
        return fmt.calls[0][0] + json.dumps([{"name": n, "arguments": a} for n, a in calls], ensure_ascii=False)
    written = [_call(fmt, i, name, arguments) for i, (name, arguments) in enumerate(calls)]
    if fmt.section is None:
        return "".join(written) if fmt.name in ("mistral", "gemma") else "\n".join(written)
    opening, closing = fmt.section
    if fmt.name == "qwen3_xml":  # one wrapper a call
        return "\n".join(f"{opening}\n{call}\n{closing}" for call in written)
    between = "\n" if isinstance(fmt.body, Tagged) or fmt.name == "deepseek_v3" else ""
    around = "\n" if isinstance(fmt.body, Tagged) else ""
    return f"{opening}{around}{between.join(written)}{around}{closing}"


def _call(fmt: Format, index: int, name: str, arguments: Mapping[str, Any]) -> str:
    body, (opening, closing) = fmt.body, fmt.calls[0]
    if isinstance(body, Tagged):
        newline = "\n" if body.newlines else ""
        between = "\n" if body.value[0] else ""
        rows = [
            f"{body.key[0]}{key}{body.key[1]}{between}{body.value[0]}{newline}{_text(value)}{newline}{body.value[1]}\n"
            for key, value in arguments.items()
        ]
        head = f"{opening}{name}{body.name_end}" + ("" if body.name_end == "\n" else "\n")
        return head + "".join(rows) + closing
    assert isinstance(body, Json)
    text = json.dumps(arguments, ensure_ascii=False)
    if fmt.name == "hermes":
        return f"{opening}\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n{closing}"
    if fmt.name == "deepseek_v3":
        return f"{opening}function<｜tool▁sep｜>{name}\n```json\n{text}\n```{closing}"
    if fmt.name == "kimi_k2":
        return f"{opening}functions.{name}:{index}<|tool_call_argument_begin|>{text}{closing}"
    if fmt.name == "gemma":
        return f"{opening}call:{name}{_bare(arguments)}{closing}"
    return f"{opening}{name}{'<｜tool▁sep｜>' if fmt.name == 'deepseek_v3.1' else ''}{text}{closing}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _python(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _bare(value: Any) -> str:
    """Write a value with bare keys and strings in the format's own quotes."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_bare(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_bare, value)) + "]"
    return json.dumps(value)


def _channels(body: Channels, calls: Sequence[Call], content: str, reasoning: str) -> str:
    end, call_end, _ = body.ends
    messages = []
    if reasoning:
        messages.append(f"{body.channel}{body.reasoning}{body.message}{reasoning}{end}")
    if content:
        messages.append(f"{body.channel}{'commentary' if calls else 'final'}{body.message}{content}{end}")
    for name, arguments in calls:
        head = f"{body.channel}commentary to=functions.{name} <|constrain|>json{body.message}"
        messages.append(f"{head}{json.dumps(arguments, ensure_ascii=False)}{call_end}")
    return f"{body.start}assistant".join(messages)
