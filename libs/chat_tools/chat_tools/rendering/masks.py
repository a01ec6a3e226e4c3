"""Which characters of a rendered conversation the assistant wrote, proven by rendering it with other words.

A message is replaced by a text that stands nowhere else, and the conversation is rendered again: what the two
renderings share before and after it is not the message's. The turn begins where the generation prompt ends, and ends
with the template's end-of-turn token, since both are how the model will meet them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from chat_tools.rendering.template import ChatTemplate, Message, content_like, template_errors, unused

_REPLACED = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")


class Region(NamedTuple):
    """Characters `start:end` that message number `message` wrote; its end-of-turn token begins at `body_end`."""

    message: int
    start: int
    body_end: int
    end: int


class Frame(NamedTuple):
    """What a template puts around an assistant turn: before it, the generation prompt; after it, the end of turn."""

    prompt: str
    closing: str


def find_frame(template: ChatTemplate, like: Message) -> Frame:
    """Find the frame by differences of renderings of a one-question conversation."""
    mark = unused([])
    question = {"role": "user", "content": content_like(like, "x")}
    answer = {"role": "assistant", "content": content_like(like, mark)}
    try:
        asked = template.text([question])
        prompted = template.text([question], add_generation_prompt=True)
        answered = template.text([question, answer])
    except template_errors():
        return Frame("", "")
    prompt = prompted[common_prefix(asked, prompted) :]  # the shorter one may have an end of its own
    return Frame(prompt, answered.partition(mark)[2])


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


def find_region(
    template: ChatTemplate, messages: Sequence[Message], index: int, text: str, prompted: bool, frame: Frame, lower: int
) -> Region | str:
    """Find what message `index` wrote in `text`, the rendering of all messages; or say why that cannot be proven."""
    message, mark = messages[index], unused([text])
    plain = {k: v for k, v in message.items() if k not in _REPLACED}
    plain["content"] = content_like(message, mark)
    found = _shared(template, messages, index, plain, text, prompted, mark)
    if found is not None:
        before, body_end = found
        body_end, end = _turn_end(template.tokenizer, text, body_end, frame.closing)
    if message.get("tool_calls") and (found is None or end > _next_begin(template, messages, index, text, prompted)):
        # Without its calls the message changes how the results are rendered: keep them, with other arguments.
        kept = {**plain, "tool_calls": [_renamed(call, mark) for call in message["tool_calls"]]}
        found = _shared(template, messages, index, kept, text, prompted, mark)
        if found is not None:
            before, inner_end = found
            body_end = end = _rendered_end(template, messages[: index + 1], text)
            if end < inner_end or end > _next_begin(template, messages, index, text, prompted):
                found = None
    if found is None:
        return f"message {index}: the template does not render its content apart from what follows"
    start = _turn_start(text, before, frame.prompt, lower)
    if start < lower:
        return f"message {index}: its beginning cannot be told from the message before"
    return Region(index, start, max(body_end, start), max(end, start))


def _shared(
    template: ChatTemplate,
    messages: Sequence[Message],
    index: int,
    other: Message,
    text: str,
    prompted: bool,
    mark: str,
) -> tuple[int, int] | None:
    """Render with another message in place of one; return the characters of `text` that are not in both renderings."""
    try:
        changed = template.text([*messages[:index], other, *messages[index + 1 :]], prompted)
    except template_errors():
        return None
    before = common_prefix(text, changed)
    after = common_suffix(text[before:], changed[before:])
    return (before, len(text) - after) if mark in changed[before : len(changed) - after] else None


def _next_begin(template: ChatTemplate, messages: Sequence[Message], index: int, text: str, prompted: bool) -> int:
    """Return where the words of the next message begin."""
    if index + 1 == len(messages):
        return len(text)
    mark = unused([text])
    following = messages[index + 1]
    other = {**{k: v for k, v in following.items() if k not in _REPLACED}, "content": content_like(following, mark)}
    found = _shared(template, messages, index + 1, other, text, prompted, mark)
    return found[0] if found is not None else 0


def _rendered_end(template: ChatTemplate, messages: Sequence[Message], text: str) -> int:
    """Return where a conversation's rendering ends in the rendering of a longer one; 0 if it is not in it."""
    try:
        shorter = template.text(messages)
    except template_errors():
        return 0
    return len(text[: common_prefix(shorter, text)].rstrip())


def _renamed(call: Any, mark: str) -> Any:
    """Return the call with other arguments (and the id that a tool message may ask for)."""
    function = call.get("function", call)
    given = function.get("arguments")
    changed = {**function, "arguments": dict.fromkeys(given or [mark], mark) if isinstance(given, dict) else mark}
    return {**call, "function": changed} if "function" in call else changed


def _turn_start(text: str, before: int, prompt: str, lower: int) -> int:
    """Return where the generation prompt (or as much of it as history keeps) ends, at or near `before`."""
    if not prompt:  # the turn begins without any header: white space before it is the model's
        return lower + len(text[lower:before].rstrip())
    at = text.rfind(prompt, lower, before + len(prompt))
    if at >= 0:
        return at + len(prompt)
    for length in range(len(prompt) - 1, len(prompt) // 3, -1):
        at = text.rfind(prompt[:length], lower, before)
        if at >= 0:
            return at + length
    return before


def _turn_end(tokenizer: Any, text: str, body_end: int, closing: str) -> tuple[int, int]:
    """Return where the end-of-turn token begins and ends; the separator after it is not the model's."""
    marker = closing.rstrip()
    specials = sorted(filter(None, getattr(tokenizer, "all_special_tokens", ())), key=len, reverse=True)
    tokens = "|".join(map(re.escape, specials))
    if specials and (run := re.match(f"(?:{tokens})+", marker)):  # the tokens up to the separator
        marker = run.group()
    if marker and text.startswith(marker, body_end):
        return body_end, body_end + len(marker)
    if marker:  # history or a call may close a turn with another token, whose last characters are the same
        for token in specials:
            at = text.rfind(token, max(body_end - len(token) + 1, 0), body_end + len(token))
            if at >= 0:
                return at, at + len(token)
    return body_end, body_end


def find_regions(
    template: ChatTemplate, messages: Sequence[Message], text: str, prompted: bool
) -> tuple[list[Region], list[str]]:
    """Find the regions of all assistant messages, in order, and say which could not be proven."""
    regions: list[Region] = []
    problems: list[str] = []
    frame: Frame | None = None
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        frame = frame or find_frame(template, message)
        lower = regions[-1].end if regions else 0
        found = find_region(template, messages, index, text, prompted, frame, lower)
        if isinstance(found, str):
            problems.append(found)
        else:
            regions.append(found)
    return regions, problems
