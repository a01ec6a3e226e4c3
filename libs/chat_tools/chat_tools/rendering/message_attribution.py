"""Which message each character of a rendered conversation came from.

Strategy
1. Every text that a message holds (content, reasoning, the strings in the arguments of its calls) is cut into segments
   at line ends and at the literals on which the template itself cuts (`</think>`).
2. Each segment gets a mark before it and one behind it: private-use characters that stand nowhere in the rendering, the
   first one telling the message. White space at a segment's sides stays outside, so that trimming works as before.
3. The marked conversation is rendered once. Without its marks it has to be the rendering character for character; then
   the marks say whose each character is, whatever the texts hold (a forged end-of-turn token is its writer's).
4. Where a template looks at the text so closely that marks change what it writes, the messages are marked one by one.
   One that cannot be marked even alone is replaced by another text: what differs between the renderings is its own.
5. What came from no message is the template's.

Invariants (tests): the pieces are in order and do not overlap; without marks the marked rendering is the rendering; a
word that stands in one message alone is in a piece of that message, wherever the template writes it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from chat_tools.rendering.cached_template import PlainMessages
from chat_tools.rendering.replaced_messages import REASONING_KEYS, MessageSpan, find_by_difference
from chat_tools.rendering.template import ChatTemplate, Message, rendering_errors
from chat_tools.rendering.text_marks import PRIVATE_CHARACTER, Marks, Place, Wrap, calls_of, thinks

_TEXT_KEYS = frozenset(("content", *REASONING_KEYS))
_BEGINNING = 10  # characters of a printed list, to see whether there is one at all
_KEY = 48  # characters of a printed list by which those that may stand at a place are found


class MessageAttribution(NamedTuple):
    """The pieces of a rendering, in order.

    `unknown` are the messages that have text but could not be found; `without_calls` those of whose tool calls the
    template leaves some out; `printed` those of `unknown` whose list of parts it writes as Python prints a list; `lost`
    those of whose text it leaves some out (of an assistant's, reasoning apart, all).
    """

    pieces: list[MessageSpan]
    unknown: Sequence[int] = ()
    without_calls: Sequence[int] = ()
    printed: Sequence[int] = ()
    lost: Sequence[int] = ()


class Marked(NamedTuple):
    """A rendering of marked messages without its marks, and whose its characters are."""

    text: str
    owners: MessageAttribution


def render_marked(
    template: ChatTemplate, messages: Sequence[Message], prompted: bool, held: bool = False
) -> Marked | None:
    """Render once, with all messages marked; return None if marks can't be read, or other text holds such characters.

    A template may write something else because of the marks: hold the text to another rendering before using it. Where
    that is known to be a text (`held`), such characters of somebody else's are in that one and not in this: they are
    not looked for here.
    """
    source = template.source
    if _has_private(source):
        return None
    if not held:
        sources = json.dumps([messages, template.tools, template.options], ensure_ascii=False, default=_plain)
        if PRIVATE_CHARACTER.search(sources):
            return None
    marked = _marked(template, messages, prompted, Marks(source, "", messages), range(len(messages)), True)
    if marked is None or not (printed := printed_parts(messages, marked.text)):
        return marked
    return marked._replace(owners=_printed(marked.owners, printed))


@lru_cache(maxsize=64)
def _has_private(source: str) -> bool:
    return PRIVATE_CHARACTER.search(source) is not None


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def attribute_messages(
    template: ChatTemplate, messages: Sequence[Message], text: str, prompted: bool
) -> MessageAttribution:
    """Find the pieces of all messages in `text`, their rendering (with a generation prompt if `prompted`)."""
    marks = Marks(template.source, text, messages)
    printed = printed_parts(messages, text)
    chosen = [index for index in range(len(messages)) if index not in printed]
    for names in (True, False):
        marked = _marked(template, messages, prompted, marks, chosen, names)
        if marked is not None and marked.text == text:
            return _printed(marked.owners, printed)
    return _printed(_one_by_one(template, messages, text, prompted, marks, chosen), printed)


def _printed(owners: MessageAttribution, printed: set[int]) -> MessageAttribution:
    """Return the owners where the lists of some messages are printed: all that is known of these."""
    pieces = [piece for piece in owners.pieces if piece.message not in printed]
    without_calls, lost = ([i for i in listed if i not in printed] for listed in (owners.without_calls, owners.lost))
    unknown = tuple(sorted({*owners.unknown, *printed}))
    return MessageAttribution(pieces, unknown, without_calls, tuple(sorted(printed)), lost)


def printed_parts(messages: Sequence[Message], text: str) -> set[int]:
    """Return the messages whose list of parts stands in `text` as Python prints it: the template takes no parts."""
    contents = {index: message.get("content") for index, message in enumerate(messages)}
    lists = {index: str(content) for index, content in contents.items() if isinstance(content, list) and content}
    beginnings = {written[:_BEGINNING] for written in lists.values()}
    if not any(beginning in text for beginning in beginnings):
        return set()
    by_key: dict[str, set[str]] = {}
    for written in lists.values():
        by_key.setdefault(written[:_KEY], set()).add(written)
    sizes = {len(key) for key in by_key}
    printed: set[str] = set()
    for beginning in beginnings:  # each place in the text once, however many lists there are
        at = text.find(beginning)
        while at >= 0:
            for size in sizes:
                printed.update(w for w in by_key.get(text[at : at + size], ()) if text.startswith(w, at))
            at = text.find(beginning, at + 1)
    return {index for index, written in lists.items() if written in printed}


def _one_by_one(
    template: ChatTemplate, messages: Sequence[Message], text: str, prompted: bool, marks: Marks, chosen: Iterable[int]
) -> MessageAttribution:
    """Find the pieces of each chosen message by a separate rendering."""
    all_pieces: list[MessageSpan] = []
    unknown: list[int] = []
    without_calls: list[int] = []
    lost: list[int] = []
    for index in chosen:
        message = messages[index]
        if not has_text(message) and not message.get("tool_calls"):
            continue
        tries = (_marked(template, messages, prompted, marks, [index], names) for names in (True, False))
        alone = next((marked.owners for marked in tries if marked is not None and marked.text == text), None)
        if alone is not None:
            all_pieces += alone.pieces
            without_calls += alone.without_calls
            lost += alone.lost
        elif (pieces := find_by_difference(template, messages, index, text, prompted)) is not None:
            all_pieces += pieces
        else:
            unknown.append(index)
    return MessageAttribution(_without_overlaps(all_pieces, messages), unknown, without_calls, (), lost)


def has_text(message: Message) -> bool:
    """Return whether a message holds anything that can be marked (names of calls not counted)."""
    return any(text.strip() for text in texts_of(message))


def texts_of(message: Message) -> list[str]:
    """List the texts that a message holds."""
    seen: list[str] = []

    def collect(text: str) -> str:
        seen.append(text)
        return text

    rewritten(message, collect, lambda _: collect, None, collect)
    return seen


def _marked(
    template: ChatTemplate,
    messages: Sequence[Message],
    prompted: bool,
    marks: Marks,
    chosen: Iterable[int],
    names: bool,
) -> Marked | None:
    """Render with some messages marked and read the marks; return None if the template refuses or splits them."""
    changed: list[Any] = PlainMessages(messages) if isinstance(messages, PlainMessages) else list(messages)
    marks.table.clear()
    marks.written.clear()
    for index in chosen:
        original, words = messages[index], marks.wrap(Place(index))
        thoughts = words
        if thinks(original):
            thoughts = marks.wrap(Place(index, is_reasoning=True))
        if original.get("tool_calls"):
            name = partial(marks.wrap_call, index, True) if names else None
            changed[index] = rewritten(original, words, partial(marks.wrap_call, index, False), name, thoughts)
        else:
            changed[index] = _with_words(original, words, thoughts)
    try:
        rendered = template.trial(changed, prompted)
    except rendering_errors():
        return None
    read = marks.read(rendered)
    if read is None:
        return None
    text, spans = read
    pieces: list[MessageSpan] = []
    written: set[Place] = set()
    counts: Counter[int] = Counter()
    for start, end, place in spans:
        message, call, is_name, is_reasoning = place
        if message in marks.escaped:
            continue
        if call is not None:
            if is_name and place in written:  # a name may come again, as that of the result
                continue
            written.add(place)
        elif not is_reasoning:
            counts[message] += 1
        pieces.append(MessageSpan(start, end, message))
    seen = {(place.message, place.call) for place in written}
    calls = {(place.message, place.call) for place in marks.table if place.call is not None} if names else set()
    without_calls = {message for message, _ in calls - seen} - marks.escaped
    lost = [
        message
        for (message, call, _, is_reasoning), due in zip(marks.table, marks.written, strict=True)
        if due > counts[message]
        and call is None
        and not is_reasoning
        and message not in marks.escaped
        and not (counts[message] and messages[message].get("role") == "assistant")
    ]
    return Marked(text, MessageAttribution(pieces, tuple(sorted(marks.escaped)), sorted(without_calls), (), lost))


def rewritten(
    message: Message,
    text: Wrap,
    argument: Callable[[int], Wrap],
    name: Callable[[int], Wrap] | None,
    reasoning: Wrap,
) -> Message:
    """Return the message with its texts, the arguments and (unless None) the names of its calls rewritten."""
    changed = _with_words(message, text, reasoning)
    if calls := calls_of(message):
        changed["tool_calls"] = [_call(call, argument(i), name and name(i)) for i, call in enumerate(calls)]
    return changed


def _with_words(message: Message, text: Wrap, reasoning: Wrap) -> dict[str, Any]:
    """Return the message with its texts rewritten and its calls unchanged."""
    changed = dict(message)
    for key, value in message.items():
        if key not in _TEXT_KEYS or value is None:
            continue
        wrap = text if key == "content" else reasoning
        if isinstance(value, str):
            changed[key] = wrap(value)
        elif isinstance(value, list):
            changed[key] = [_part(part, wrap) for part in value]
        elif isinstance(value, Mapping):
            changed[key] = _value(value, wrap)
    return changed


def _part(part: Any, text: Wrap) -> Any:
    if isinstance(part, dict | Mapping) and isinstance(part.get("text"), str):
        return {**part, "text": text(part["text"])}
    return text(part) if isinstance(part, str) else part


def _call(call: Any, argument: Wrap, name: Wrap | None) -> Any:
    if not isinstance(call, Mapping):
        return call
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        return call
    changed = dict(function)
    if "arguments" in function:
        changed["arguments"] = _value(function["arguments"], argument)
    if name is not None and isinstance(function.get("name"), str):
        changed["name"] = name(function["name"])
    return {**call, "function": changed} if "function" in call else changed


def _value(value: Any, text: Wrap) -> Any:
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {key: _value(item, text) for key, item in value.items()}
    return [_value(item, text) for item in value] if isinstance(value, list) else value


def _without_overlaps(pieces: list[MessageSpan], messages: Sequence[Message]) -> list[MessageSpan]:
    """Order pieces that were found one by one; where two overlap, the assistant's is cut.

    Where neither is the assistant's, the later one keeps the overlap, and the rest stays the other's.
    """
    waiting = list(pieces)
    heapify(waiting)
    ordered: list[MessageSpan] = []
    while waiting:
        piece = heappop(waiting)
        if not ordered or piece.start >= ordered[-1].end:
            ordered.append(piece)
        elif messages[piece.message].get("role") == "assistant":
            heappush(waiting, MessageSpan(ordered[-1].end, max(piece.end, ordered[-1].end), piece.message))
        else:
            start, end, message = ordered.pop()
            if start < piece.start:
                ordered.append(MessageSpan(start, piece.start, message))
            if end > piece.end and messages[message].get("role") != "assistant":
                heappush(waiting, MessageSpan(piece.end, end, message))
            ordered.append(piece)
    return ordered
