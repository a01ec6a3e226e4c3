"""Writers: calls as models trained on a format write them, the readers' other direction, for examples and tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from chat_tools.known_formats.grammar import Call, Channels, Elements, Format, Json, Tagged


def text_of(value: Any) -> str:
    """Return a value between tags: text as it is, everything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def json_of(value: Any) -> str:
    """Return JSON that is not escaped to ASCII."""
    return json.dumps(value, ensure_ascii=False)


def section_of_each(fmt: Format, calls: Sequence[Call]) -> str:
    """Return tagged calls, each with a wrapper of its own."""
    assert fmt.section is not None
    opening, closing = fmt.section
    return "\n".join(f"{opening}\n{_tagged(fmt, *call)}\n{closing}" for call in calls)


def tagged(fmt: Format, calls: Sequence[Call]) -> str:
    """Return tagged calls, a line each, in one wrapper if there is one."""
    written = "\n".join(_tagged(fmt, *call) for call in calls)
    return f"{fmt.section[0]}\n{written}\n{fmt.section[1]}" if fmt.section else written


def tagged_messages(fmt: Format, calls: Sequence[Call]) -> str:
    """Return tagged calls, each in a wrapper and a message of its own; the first header follows the prompt's."""
    assert fmt.recipients is not None
    end, _, start = fmt.ends
    heads = (f"{fmt.recipients.mark}{name}{fmt.recipients.message}" for name, _ in calls)
    return f"{end}{start}".join(head + tagged(fmt, [call]) for head, call in zip(heads, calls, strict=True))


def tagged_in_one_line(fmt: Format, calls: Sequence[Call]) -> str:
    """Return tagged calls without white space between tags."""
    written = "".join(_tagged(fmt, *call).replace("\n" + fmt.calls[0][1], fmt.calls[0][1]) for call in calls)
    return f"{fmt.section[0]}{written}{fmt.section[1]}" if fmt.section else written


def without_space(fmt: Format, calls: Sequence[Call]) -> str:
    """Return tagged calls of a key and a value for each argument, without white space."""
    body, (opening, closing) = fmt.body, fmt.calls[0]
    assert isinstance(body, Tagged)
    (key, key_end), (value, value_end) = body.key, body.value
    pairs = [
        "".join(f"{key}{k}{key_end}{value}{text_of(v)}{value_end}" for k, v in given.items()) for _, given in calls
    ]
    written = "".join(f"{opening}{name}{pair}{closing}" for (name, _), pair in zip(calls, pairs, strict=True))
    return f"{fmt.section[0]}{written}{fmt.section[1]}" if fmt.section else written


def _tagged(fmt: Format, name: str, arguments: Mapping[str, Any]) -> str:
    body, (opening, closing) = fmt.body, fmt.calls[0]
    assert isinstance(body, Tagged)
    newline = "\n" if body.newlines else ""
    between = "\n" if body.value[0] else ""
    rows = [
        f"{body.key[0]}{key}{_attribute(body, value)}{body.key[1]}{between}"
        f"{body.value[0]}{newline}{_value(body, value)}{newline}{body.value[1]}\n"
        for key, value in arguments.items()
    ]
    head = f"{opening}{name}{body.name_end}" + ("" if body.name_end == "\n" else "\n")
    return head + "".join(rows) + closing


def _value(body: Tagged, value: Any) -> str:
    """Return a value between its tags; text with signs of markup between the pair that keeps it."""
    text = text_of(value)
    opening, closing = body.raw
    return opening + text + closing if opening and isinstance(value, str) and set(text) & set("<&\n") else text


def _attribute(body: Tagged, value: Any) -> str:
    return f'" {body.attribute}="{"true" if isinstance(value, str) else "false"}"' if body.attribute else ""


def with_attributes(fmt: Format, calls: Sequence[Call]) -> str:
    """Return calls of Kimi K3: tags with a call's number and an argument's type, without white space."""
    (opening, closing), body = fmt.calls[0], fmt.body
    assert isinstance(body, Tagged)
    assert fmt.section is not None
    written = fmt.section[0]
    for index, (name, arguments) in enumerate(calls, 1):
        written += f'{opening}{_entities(name)}" index="{index}"{body.name_end}'
        for key, value in arguments.items():
            kind = f'{_entities(key)}" {body.attribute}="{_kind(value)}"'
            written += f"{body.key[0]}{kind}{body.key[1]}{text_of(value)}{body.value[1]}"
        written += closing
    return written + fmt.section[1]


def _entities(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _kind(value: Any) -> str:
    """Return the JSON type of a value."""
    names = {str: "string", bool: "boolean", int: "number", float: "number", type(None): "null", list: "array"}
    return names.get(type(value), "object")


def elements(fmt: Format, calls: Sequence[Call]) -> str:
    """Return calls of MiniMax M3: an element an argument, a line each, in one wrapper."""
    (opening, closing), body = fmt.calls[0], fmt.body
    assert isinstance(body, Elements)
    assert fmt.section is not None
    lines = [fmt.section[0]]
    for name, arguments in calls:
        lines.append(f"{opening}{name}{body.name_end}")
        lines += [_element(body, key, value) for key, value in arguments.items()]
        lines.append(closing)
    return "\n".join([*lines, fmt.section[1]])


def _element(body: Elements, name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        inside = "".join(_element(body, key, item) for key, item in value.items())
    elif isinstance(value, list):
        inside = "".join(_element(body, body.item, item) for item in value)
    else:
        inside = text_of(value)
    return f"{body.prefix}<{name}>{inside}{body.prefix}</{name}>"


def objects(fmt: Format, calls: Sequence[Call]) -> str:
    """Return an object a call between its markers, a line each."""
    opening, closing = fmt.calls[0]
    return "\n".join(f"{opening}\n{json_of({'name': n, 'arguments': a})}\n{closing}" for n, a in calls)


def object_lines(fmt: Format, calls: Sequence[Call]) -> str:
    """Return an object a call, a line each, in one pair of markers."""
    opening, closing = fmt.calls[0]
    return "\n".join([opening, *(json_of({"name": n, "arguments": a}) for n, a in calls), closing])


def parameter_objects(fmt: Format, calls: Sequence[Call]) -> str:
    """Return an object with `parameters` a call, without markers, joined by semicolons."""
    del fmt
    return "; ".join(json_of({"name": n, "parameters": a}) for n, a in calls)


def marked_objects(fmt: Format, calls: Sequence[Call]) -> str:
    """Return an object a call after its marker, which has no closing one."""
    return "".join(f"{fmt.calls[0][0]}\n{json_of({'name': n, 'arguments': a})}" for n, a in calls)


def marked_parameters(fmt: Format, calls: Sequence[Call]) -> str:
    """Return an object with `parameters` a call between its markers."""
    opening, closing = fmt.calls[0]
    return "".join(f"{opening}\n{json_of({'name': n, 'parameters': a})}{closing}" for n, a in calls)


def one_list(fmt: Format, calls: Sequence[Call]) -> str:
    """Return all calls in one list of objects, after the marker or the text with which an answer begins."""
    opening, closing = fmt.calls[0] if fmt.calls else ("", "")
    lead = fmt.body.lead if isinstance(fmt.body, Json) else ""
    return f"{lead or opening}{json_of([{'name': n, 'arguments': a} for n, a in calls])}{'' if lead else closing}"


def bare_list(fmt: Format, calls: Sequence[Call]) -> str:
    """Return all calls in one list of objects, without a marker."""
    del fmt
    return json_of([{"name": n, "arguments": a} for n, a in calls])


def keyed_list(fmt: Format, calls: Sequence[Call]) -> str:
    """Return all calls in one list of objects of one key, the name."""
    opening, closing = fmt.calls[0]
    return f"{opening}{json_of([{n: a} for n, a in calls])}{closing}"


def numbered_list(fmt: Format, calls: Sequence[Call]) -> str:
    """Return all calls in one list of objects with numbers for ids (Cohere)."""
    opening, closing = fmt.calls[0]
    rows = [{"tool_call_id": str(i), "tool_name": n, "parameters": a} for i, (n, a) in enumerate(calls)]
    return f"{opening}{json_of(rows)}{closing}"


def after_name(fmt: Format, calls: Sequence[Call], separator: str = "", between: str = "") -> str:
    """Return the name, a separator and the arguments' object, between the markers of each call."""
    opening, closing = fmt.calls[0]
    written = between.join(f"{opening}{name}{separator}{json_of(arguments)}{closing}" for name, arguments in calls)
    return f"{fmt.section[0]}{written}{fmt.section[1]}" if fmt.section else written


def after_separator(fmt: Format, calls: Sequence[Call]) -> str:
    """Return calls of DeepSeek V3.1: the name, a separator, the object."""
    return after_name(fmt, calls, "<｜tool▁sep｜>")


def after_marker(fmt: Format, calls: Sequence[Call]) -> str:
    """Return calls of Mistral: the name, a marker, the object."""
    return after_name(fmt, calls, "[ARGS]")


def after_name_tag(fmt: Format, calls: Sequence[Call]) -> str:
    """Return calls of functionary: the name in the tag, the object after it."""
    return after_name(fmt, calls, ">")


def after_line(fmt: Format, calls: Sequence[Call]) -> str:
    """Return calls of functionary 3.2: the name in a line, the object behind it; the prompt holds the first marker."""
    return after_name(fmt, calls, "\n").removeprefix(fmt.prompt_end[0])


def with_ids(fmt: Format, calls: Sequence[Call]) -> str:
    """Return calls of Solar: an id of ten characters, the name, the object."""
    assert fmt.section is not None
    opening, closing = fmt.calls[0]
    heads = [f"{opening}call{i:06}<|tool_call:name|>{n}<|tool_call:args|>" for i, (n, _) in enumerate(calls)]
    written = "".join(f"{head}{json_of(a)}{closing}" for head, (_, a) in zip(heads, calls, strict=True))
    return f"{fmt.section[0]}{written}{fmt.section[1]}"


def named_objects(fmt: Format, calls: Sequence[Call]) -> str:
    """Return calls of PLaMo 3: the name between markers, the object between others."""
    assert fmt.section is not None
    (opening, closing), body = fmt.calls[0], fmt.body
    assert isinstance(body, Json)
    name, begin = "<|plamo:{}_tool_name:plamo|>", body.after.replace("end_", "begin_") + "<|plamo:constrain|>json"
    heads = [f"{opening}{name.format('begin')}{n}{name.format('end')}{begin}<|plamo:msg|>" for n, _ in calls]
    written = [f"{head}{json_of(a)}{body.after}{closing}" for head, (_, a) in zip(heads, calls, strict=True)]
    return fmt.section[0] + "".join(written) + fmt.section[1]


def fenced(fmt: Format, calls: Sequence[Call]) -> str:
    """Return calls of DeepSeek V3: the object in a fence of JSON."""
    assert fmt.section is not None
    opening, closing = fmt.calls[0]
    written = [f"{opening}function<｜tool▁sep｜>{n}\n```json\n{json_of(a)}\n```{closing}" for n, a in calls]
    return fmt.section[0] + "\n".join(written) + fmt.section[1]


def numbered(fmt: Format, calls: Sequence[Call]) -> str:
    """Return calls of Kimi K2: the name with its namespace and number."""
    assert fmt.section is not None
    (opening, closing), middle = fmt.calls[0], "<|tool_call_argument_begin|>"
    written = [f"{opening}functions.{n}:{i}{middle}{json_of(a)}{closing}" for i, (n, a) in enumerate(calls)]
    return fmt.section[0] + "".join(written) + fmt.section[1]


def python_list(fmt: Format, calls: Sequence[Call]) -> str:
    """Return a list of Python calls, between the markers where the format needs them."""
    opening, closing = ("", "") if fmt.opening else fmt.calls[0]
    return f"{opening}[{', '.join(_python(*call) for call in calls)}]{closing}"


def python_lines(fmt: Format, calls: Sequence[Call]) -> str:
    """Return Python calls, a line each between the markers."""
    opening, closing = fmt.calls[0]
    return "\n".join([opening, *(_python(*call) for call in calls), closing])


def _python(name: str, arguments: Mapping[str, Any]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def bare_keys(fmt: Format, calls: Sequence[Call]) -> str:
    """Return calls of Gemma: objects with bare keys and strings in quotes of their own."""
    (opening, closing), body = fmt.calls[0], fmt.body
    assert isinstance(body, Json)
    quote = body.quotes[0]
    return "".join(f"{opening}call:{name}{_bare(arguments, quote)}{closing}" for name, arguments in calls)


def _bare(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_bare(item, quote)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_bare(item, quote) for item in value) + "]"
    return json.dumps(value)


def messages(fmt: Format, calls: Sequence[Call]) -> str:
    """Return calls of gpt-oss: a message to a function for each call."""
    body = fmt.body
    assert isinstance(body, Channels)
    heads = [f"{body.channel}commentary to=functions.{name} <|constrain|>json{body.message}" for name, _ in calls]
    written = [f"{head}{json_of(a)}{body.ends[1]}" for head, (_, a) in zip(heads, calls, strict=True)]
    return f"{body.start}assistant".join(written)


def write_turn(fmt: Format, calls: Sequence[Call], content: str = "", reasoning: str = "") -> str:
    """Return a turn as a model trained on the format writes it: reasoning, if it has markers of it, content, calls."""
    if isinstance(fmt.body, Channels):
        return _channels(fmt, fmt.body, calls, content, reasoning)
    if fmt.recipients is not None:
        to, (end, _, start) = fmt.recipients, fmt.ends
        said = [
            f"{to.mark}{name}{to.message}{text}"
            for name, text in ((to.reasoning, reasoning), (to.content, content))
            if text
        ]
        return f"{end}{start}".join([*said, *([fmt.write(calls)] if calls else [])])
    text = ""
    if reasoning and fmt.reasoning:
        opening, closing = fmt.reasoning[0]
        text += f"{opening}\n{reasoning}\n{closing}\n\n"
    text += content
    marker, header = fmt.prompt_end
    if marker:
        return marker.join([*([header + text] if text else []), *([fmt.write(calls)] if calls else [])])
    if calls:
        text += ("\n\n" if content else "") + fmt.write(calls)
    return text


def _channels(fmt: Format, body: Channels, calls: Sequence[Call], content: str, reasoning: str) -> str:
    end = body.ends[0]
    parts = []
    if reasoning:
        parts.append(f"{body.channel}{body.reasoning}{body.message}{reasoning}{end}")
    if content:
        parts.append(f"{body.channel}{'commentary' if calls else 'final'}{body.message}{content}{end}")
    if calls:
        parts.append(fmt.write(calls))
    return f"{body.start}assistant".join(parts)
