"""Which format a chat template makes a model write its calls in.

Strategy
1. The template writes a call, and two where it takes two: the format that reads them back is the one, with nothing
   else in the turn, or else with the template's own text around them. Of several (hermes and ernie45) it is the one
   whose own sign is in the template. A call that no format reads is an error: no other format is guessed.
2. A template that writes no call: the format whose markers are all in its text, the one with most of them, if what it
   writes is read back where the template writes it as content.
3. A checkpoint's `response_template` (transformers) has to read what the format writes; where the template decides
   nothing, it alone decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from chat_tools.known_formats.grammar import Call, Channels, Elements, Format, Json, Tagged
from chat_tools.known_formats.tagged_entries import WITH_SUFFIX
from chat_tools.parsing.formats import FORMATS
from chat_tools.parsing.parser import parse
from chat_tools.rendering.masks import find_regions
from chat_tools.rendering.template import ChatTemplate, Message, rendering_errors

_NAME = "look_up"
_CALLS: tuple[Call, ...] = (
    (_NAME, {"word": "a b", "times": 2}),
    (_NAME, {"word": "c d", "times": 3}),
)
_LINES = (_NAME, {"word": "\na b\n", "times": 2})
_TOOL = {
    "name": _NAME,
    "description": "Look a word up.",
    "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "times": {"type": "integer"}}},
}
_TOOLS = [{"type": "function", "function": _TOOL}]
_SUFFIX = re.compile(r"<tool_calls(:[\w.-]+)>")
_SHOWN = 300  # characters of a call in an error


def detect_format(tokenizer: Any) -> str:
    """Return the name of the format of a tokenizer's chat template.

    What the template writes is read back before the answer. ValueError for a template whose calls no format reads, for
    one that shows no format, and where the tokenizer's `response_template` reads something else.
    """
    template = ChatTemplate(tokenizer, _TOOLS, {})
    calls = _written_calls(template, _CALLS[:1])
    fmt = written_format(template) or _around(template, calls)
    written = next((text for text in calls if _NAME in text and "a b" in text), None)
    if fmt is None:
        fmt = _by_markers(template, with_sign=written is not None)
    if getattr(tokenizer, "response_template", None) is not None:
        fmt = _by_response_template(template, fmt)
    if fmt is not None:
        return fmt.name
    known = ", ".join(sorted(FORMATS))
    if written is not None:
        raise ValueError(
            f"the chat template writes a call that no known format reads: {written[-_SHOWN:]!r}; "
            f"choose one of: {known}, or give a format of your own"
        )
    raise ValueError(f"the chat template writes calls in no known format; choose one of: {known}")


def written_format(template: ChatTemplate) -> Format | None:
    """Return the format that reads a template's calls, and nothing else in the turn; None where none does.

    Cached as long as the tokenizer lives.
    """
    with_tool = ChatTemplate(template.tokenizer, _TOOLS, template.options, ())
    key = with_tool.source, repr(template.options)
    known = _WRITTEN.setdefault(template.tokenizer, {})
    if key not in known:
        texts = _written_calls(with_tool, _CALLS[:1])
        known[key] = _chosen(with_tool, texts, [fmt for text in texts for fmt in _formats(text) if _reads(fmt, text)])
    return known[key]


_WRITTEN: WeakKeyDictionary[Any, dict[tuple[str, str], Format | None]] = WeakKeyDictionary()


def _formats(text: str) -> Iterator[Format]:
    """Yield all formats, and before them those whose tags have the suffix of the tags in a text."""
    if suffix := _SUFFIX.search(text):
        yield from (entry(suffix[1]) for entry in WITH_SUFFIX.values())
    yield from FORMATS.values()


def _chosen(template: ChatTemplate, texts: Sequence[str], candidates: Sequence[Format]) -> Format | None:
    """Return the best of the candidates that read two calls as well, where the template writes two.

    Better is one whose sign is in the template, then one that keeps a text's line ends, then one that writes the same,
    but for white space, then with it.
    """
    both = [text for text in _written_calls(template, _CALLS) if "c d" in text and "a b" in text]
    lines = [text for text in _written_calls(template, [_LINES]) if "a b" in text]
    said = [text.rpartition("</think>")[2].strip() for text in texts]

    def rank(fmt: Format) -> tuple[bool, bool, bool, bool]:
        signed = bool(fmt.sign) and fmt.sign in template.source
        lines_kept = any(_calls(fmt, text) == [_LINES] for text in lines)
        own = fmt.write(_CALLS[:1])
        without_space = "".join(own.split())
        same = any("".join(text.split()).startswith(without_space) for text in said)
        return signed, lines_kept, same, any(text.startswith(own) for text in said)

    able = [fmt for fmt in candidates if not both or any(_calls(fmt, text) == list(_CALLS) for text in both)]
    able = [fmt for fmt in able if fmt.prompt_end[0] in template.source]
    return max(able, key=rank, default=None)


def _around(template: ChatTemplate, texts: Sequence[str]) -> Format | None:
    """Return the format that reads a template's calls by their marker, among other text of the template's."""
    marked = [
        fmt
        for text in texts
        for fmt in _formats(text)
        if any(opening in text for opening in _openings(fmt)) and _calls(fmt, text) == [_CALLS[0]]
    ]
    return _chosen(template, texts, marked)


def _openings(fmt: Format) -> list[str]:
    """Return the markers with which a call of a format may begin."""
    body = fmt.body
    own = [body.channel] if isinstance(body, Channels) else [body.lead] if isinstance(body, Json) else []
    return [mark for mark in (*(opening for opening, _ in fmt.calls), *own) if mark]


def _reads(fmt: Format, text: str) -> bool:
    """Return whether the format reads the turn as the call and nothing else."""
    message = parse(text, fmt, [_TOOL])
    calls = [(call.name, call.arguments_dict()) for call in message.tool_calls]
    return calls == [_CALLS[0]] and not message.malformed and not message.content


def _calls(fmt: Format, text: str) -> list[Call] | None:
    """Return the calls that a format reads in a turn; None where a call was not read, or its text is content too."""
    start = f"{fmt.body.start}assistant" if isinstance(fmt.body, Channels) else ""
    message = parse(start + text, fmt, [_TOOL])
    said = message.content + message.reasoning
    if message.malformed or any(word in said for word in (_NAME, "a b", "c d")):
        return None
    return [(call.name, call.arguments_dict()) for call in message.tool_calls]


def _by_markers(template: ChatTemplate, with_sign: bool) -> Format | None:
    """Return the format most of whose markers are in the template's text, and that is read back as content.

    `with_sign` takes those alone that have a sign of their own: the template writes calls, in no format.
    """
    scored: list[tuple[int, Format]] = []
    for fmt in FORMATS.values():
        separator = fmt.body.name_end if isinstance(fmt.body, Tagged) and fmt.body.name_end[0] == "<" else ""
        needed = [[mark] for mark in ((fmt.section or ("",))[0], fmt.sign, separator) if mark] + [_openings(fmt)]
        has_all = all(any(mark in template.source for mark in marks) for marks in needed)
        if has_all and (fmt.sign or not with_sign):
            scored.append((sum(mark in template.source for mark in _all_markers(fmt)), fmt))
    scored.sort(key=lambda item: -item[0])
    return next((fmt for _, fmt in scored if _read_as_content(template, fmt)), None)


def _all_markers(fmt: Format) -> set[str]:
    """Return what stands in every call of a format: its markers and tags."""
    body, pairs = fmt.body, [*fmt.calls, fmt.section or ("", "")]
    marks = {mark for pair in pairs for mark in pair}
    if isinstance(body, Tagged):
        marks |= {body.key[0], *body.value}
    if isinstance(body, Elements):
        marks.add(body.prefix)
    if isinstance(body, Channels):
        marks |= {body.start, body.channel, body.message}
    return {mark for mark in (*marks, fmt.sign, *_openings(fmt)) if len(mark) > 1}


def _read_as_content(template: ChatTemplate, fmt: Format) -> bool:
    """Return whether a call that the format writes is read back, written as content; for a template that takes some."""
    content = fmt.write(_CALLS[:1])
    messages: list[Message] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": content}]
    texts = _turns(template, messages)
    return not texts or any(_calls(fmt, text) == [_CALLS[0]] for text in texts)


def _written_calls(template: ChatTemplate, calls: Sequence[Call]) -> list[str]:
    """Return a turn with the calls, rendered with arguments as values and as JSON text."""
    texts: list[str] = []
    for as_text in (False, True):
        given = [(name, json.dumps(arguments) if as_text else arguments) for name, arguments in calls]
        written = [
            {"id": f"call0000{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(given, 1)
        ]
        texts += _turns(
            template, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": written}]
        )
    return texts


def _turns(template: ChatTemplate, messages: Sequence[Message]) -> list[str]:
    """Return the assistant's turns of a conversation, without the token that ends a sequence; [] if it is refused."""
    try:
        text = template.text(messages)
    except rendering_errors():
        return []
    regions = find_regions(template, messages, text, False).regions
    end = getattr(template.tokenizer, "eos_token", None) or ""
    return [text[r.start : r.end].removesuffix(end) for r in regions]


def _by_response_template(template: ChatTemplate, fmt: Format | None) -> Format:
    """Return the format whose calls the checkpoint's own response template reads: the given one, or else the first.

    ValueError where it reads other calls than the format writes.
    """
    read = [other for other in ([fmt] if fmt is not None else FORMATS.values()) if _checkpoint_reads(template, other)]
    if not read:
        what = (
            f"the calls of {fmt.name}, in which the chat template writes" if fmt is not None else "any format's calls"
        )
        raise ValueError(
            f"the tokenizer's response_template does not read {what}: mend the one in tokenizer_config.json, or choose "
            f"one of: {', '.join(sorted(FORMATS))}"
        )
    return read[0]


def _checkpoint_reads(template: ChatTemplate, fmt: Format) -> bool:
    """Return whether transformers reads the calls that a format writes by the tokenizer's response template."""
    prompt = template.text([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    turn = fmt.write(_CALLS[:1]) + (getattr(template.tokenizer, "eos_token", None) or "")
    try:
        message = template.tokenizer.parse_response(turn, prefix=prompt, tools=_TOOLS)
    except ValueError:  # what transformers raises for a turn that its response template does not take
        return False
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return [(call.get("name"), call.get("arguments")) for call in calls] == [_CALLS[0]]
