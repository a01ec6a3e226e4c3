"""Which format a chat template makes a model write its calls in."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from chat_tools.parsing.formats import FORMATS
from chat_tools.parsing.grammar import Format
from chat_tools.parsing.parser import parse
from chat_tools.rendering.masks import find_regions
from chat_tools.rendering.template import ChatTemplate, Message, template_errors

_NAME, _ARGUMENTS = "look_up", {"word": "a b", "times": 2}
_TOOL = {
    "name": _NAME,
    "description": "Look a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "times": {"type": "integer"}}},
}

# Texts that stand in the templates of one format alone, the most telling first; others have their first marker.
_SIGNS = (
    ("<minimax:tool_call>", "minimax"),
    ("<seed:tool_call>", "seed"),
    ("<arg_key>", "glm-4.5"),
    ("<|tool_call_argument_begin|>", "kimi_k2"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call>", "gemma"),
    ("<start_function_call>", "gemma"),
    ("<|tool_call|>", "granite"),
    ("<|channel|>", "harmony"),
    ("<function=", "qwen3_xml"),
    ("<tool_call>", "hermes"),
    ("```json", "deepseek_v3"),
    ("<｜tool▁sep｜>", "deepseek_v3.1"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
)


def detect_format(tokenizer: Any) -> str:
    """Return the name of the format of a tokenizer's chat template.

    A call is rendered with the template and read back: the format that gives the same call is the one; of several that
    write the same (hermes and ernie45), the one whose own sign is in the template. For a template that refuses the
    call, its text decides. ValueError if neither decides.
    """
    template = ChatTemplate(tokenizer, [{"type": "function", "function": _TOOL}], {})
    source = template.source
    if fmt := written_format(template):
        return fmt.name
    for sign, name in (*_own_signs(), *_SIGNS):
        if sign in source:
            return name
    raise ValueError(f"the chat template writes calls in no known format; choose one of: {', '.join(sorted(FORMATS))}")


def written_format(template: ChatTemplate) -> Format | None:
    """Return the format in which a template writes a call, found by reading the call back; None where none reads it.

    Cached as long as the tokenizer lives.
    """
    with_tool = ChatTemplate(template.tokenizer, [{"type": "function", "function": _TOOL}], template.options, ())
    key = with_tool.source, repr(template.options)
    known = _WRITTEN.setdefault(template.tokenizer, {})
    if key not in known:
        known[key] = _written_format(with_tool)
    return known[key]


_WRITTEN: WeakKeyDictionary[Any, dict[tuple[str, str], Format | None]] = WeakKeyDictionary()


def _written_format(template: ChatTemplate) -> Format | None:
    for text in _written_calls(template):
        if candidates := [fmt for fmt in FORMATS.values() if _reads(fmt, text)]:
            return next((fmt for fmt in candidates if fmt.sign and fmt.sign in template.source), candidates[0])
    return None


def _reads(fmt: Format, text: str) -> bool:
    """Return whether the format reads the turn as the call and nothing else."""
    message = parse(text, fmt, [_TOOL])
    calls = [(call.name, call.arguments_dict()) for call in message.tool_calls]
    return calls == [(_NAME, _ARGUMENTS)] and not message.malformed and not message.content


def _own_signs() -> list[tuple[str, str]]:
    """Return the signs of the formats that are not listed above."""
    listed = {name for _, name in _SIGNS}
    taken = {sign for sign, _ in _SIGNS}
    others = [fmt for fmt in FORMATS.values() if fmt.name not in listed]
    firsts = [(fmt.sign or (fmt.section or (*fmt.calls, ("", ""))[0])[0], fmt.name) for fmt in others]
    return [(sign, name) for sign, name in firsts if sign and sign not in taken]


def _written_calls(template: ChatTemplate) -> list[str]:
    """Return a call, rendered with arguments as values and as JSON text."""
    texts = []
    for arguments in (_ARGUMENTS, '{"word": "a b", "times": 2}'):
        call = {"id": "call00001", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
        messages: list[Message] = [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        try:
            text = template.text(messages)
        except template_errors():
            continue
        except TypeError:  # what a template raises that joins text to a dict
            continue
        regions = find_regions(template, messages, text, False).regions
        texts += [text[r.start : r.end] for r in regions]
    return texts
