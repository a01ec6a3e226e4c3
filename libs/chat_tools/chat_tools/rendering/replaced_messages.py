"""Messages found in a rendering by what changes when another text stands in their place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from chat_tools.rendering.template import ChatTemplate, Message, content_like, rendering_errors, template_errors, unused

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
WRITTEN_KEYS = ("content", *REASONING_KEYS, "tool_calls")


MAX_FAILURES = 3  # messages of one kind that are tried alone: where none of them can be told, the others are not tried


class MessageSpan(NamedTuple):
    """Characters `start:end` of a rendering, which message number `message` holds."""

    start: int
    end: int
    message: int


class NamelessText(NamedTuple):
    """A text of the template in which `names`, in order, are one character each: the same in turns of other names."""

    text: str
    names: Sequence[str] = ()

    def length(self, place: int) -> int:
        """Return how many characters of the text itself stand before a place of the nameless one."""
        return place + sum(len(name) - 1 for name in self.names[: self.text.count(_NAME, 0, place)])

    def place(self, length: int) -> int | None:
        """Return the place behind the first `length` characters; None within a name."""
        place, at = length, -1
        for name in self.names:
            at = self.text.index(_NAME, at + 1)
            if at >= place:
                break
            place -= len(name) - 1
            if at >= place:
                return None
        return place


_NAME = "\0"


def without_names(text: str, messages: Sequence[Message], numbers: bool = False) -> NamelessText:
    """Return a text in which the ids and names of the messages' calls and results are as good as any other.

    With `numbers` all numbers are: templates count rounds.
    """
    names = {name for message in messages for name in _names(message) if name in text} if text else set()
    patterns = [*map(re.escape, sorted(names, key=len, reverse=True)), *([r"\d+"] if numbers else [])]
    if not patterns or _NAME in text:
        return NamelessText(text)
    parts = re.split(f"({'|'.join(patterns)})", text)
    return NamelessText(_NAME.join(parts[::2]), parts[1::2])


def _names(message: Message) -> Iterator[str]:
    """Yield what templates write beside the words of a message, and nobody marks.

    That is what names its calls, or the call that it answers, the numbers in its calls, and its parts as Python prints
    them.
    """
    if isinstance(message.get("content"), list):
        yield str(message["content"])
    for value in (message.get("tool_call_id"), message.get("name")):
        if isinstance(value, str) and value:
            yield value
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list | tuple) else ():
        if not isinstance(call, Mapping):
            continue
        if isinstance(call.get("id"), str) and call["id"]:
            yield call["id"]
        function = call.get("function", call)
        yield from _numbers(function.get("arguments") if isinstance(function, Mapping) else None)


def _numbers(value: Any) -> Iterator[str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value)
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(item)


def find_by_difference(
    template: ChatTemplate, messages: Sequence[Message], index: int, text: str, prompted: bool
) -> list[MessageSpan] | None:
    """Find a message by rendering another text in its place: one piece of all differences, or None.

    The piece of a message without text is empty, at the place of the text.
    """
    mark = unused([text])
    other = _replaced(messages[index], mark)
    try:
        changed = template.text([*messages[:index], other, *messages[index + 1 :]], prompted)
    except template_errors():
        return None
    before = common_prefix(text, changed)
    after = common_suffix(text[before:], changed[before:])
    if mark not in changed[before : len(changed) - after]:
        return None
    return [MessageSpan(before, len(text) - after, index)]


def find_together(
    template: ChatTemplate, messages: Sequence[Message], indices: Sequence[int], text: str, prompted: bool
) -> dict[int, MessageSpan]:
    """Find messages without text by one rendering with a text in each of them; each is an empty piece at its place.

    It has to be the rendering with nothing but these texts inserted. Else they are found one by one
    (`find_by_difference`); those that are not found so are left out, and the rest where none of the first few is.
    """
    mark = unused([text])
    first, last = mark[0], mark[-1]
    changed = list(messages)
    for index in indices:
        changed[index] = _replaced(messages[index], f"{first}{index}{last}")
    try:
        rendered = template.trial(changed, prompted)
    except rendering_errors():
        rendered = ""
    parts = re.split(f"{first}([0-9]+){last}", rendered)
    if [*map(int, parts[1::2])] == list(indices) and "".join(parts[::2]) == text:
        places = accumulate(map(len, parts[::2]))
        return {index: MessageSpan(at, at, index) for index, at in zip(indices, places, strict=False)}
    spans: dict[int, MessageSpan] = {}
    for number, index in enumerate(indices):
        pieces = find_by_difference(template, messages, index, text, prompted)
        if pieces:
            spans[index] = pieces[0]
        elif not spans and number + 1 >= MAX_FAILURES:
            break
    return spans


def _replaced(message: Message, mark: str) -> Message:
    """Return the message with another text in place of all that is written of it, with as many calls."""
    other = {**{k: v for k, v in message.items() if k not in WRITTEN_KEYS}, "content": content_like(message, mark)}
    if message.get("tool_calls"):  # without calls the results that follow may be rendered in another way
        other["tool_calls"] = [_renamed(call, mark) for call in message["tool_calls"]]
    return other


def _renamed(call: Any, mark: str) -> Any:
    """Return the call with other arguments (and the id that a tool message may ask for)."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function", call), Mapping):
        return call
    function = call.get("function", call)
    values = function.get("arguments")
    changed = {**function, "arguments": dict.fromkeys(values or [mark], mark) if isinstance(values, Mapping) else mark}
    return {**call, "function": changed} if "function" in call else changed


def common_prefix(a: str, b: str) -> int:
    """Return the length of the common prefix."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def common_suffix(a: str, b: str) -> int:
    """Return the length of the common suffix."""
    return common_prefix(a[::-1], b[::-1])
