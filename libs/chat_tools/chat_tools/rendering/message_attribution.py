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
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from heapq import heapify, heappop, heappush
from itertools import accumulate
from typing import Any, NamedTuple

from chat_tools.rendering.replaced_messages import REASONING_KEYS, MessageSpan, find_by_difference
from chat_tools.rendering.template import ChatTemplate, Message, rendering_errors

_TEXT_KEYS = frozenset(("content", *REASONING_KEYS))
_REASONING = frozenset(REASONING_KEYS)
_BEGINNING = 10  # characters of a printed list, to see whether there is one at all
_PRIVATE = 0xF0000  # planes 15 and 16: no script has characters there
_PRIVATE_CHARACTER = re.compile("[\U000f0000-\U0010ffff]")
# What a template compares a text with, or cuts it at: marks must not stand inside or before it.
_CUTS = re.compile(r"""(?:split|startswith|endswith|replace)\(\s*(['"])(.+?)\1|(['"])([^'"\n]+)\3\s+(?:not\s+)?in\s""")
Wrap = Callable[[str], str]


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
    if _PRIVATE_CHARACTER.search(source):
        return None
    if not held:
        sources = json.dumps([messages, template.tools, template.options], ensure_ascii=False, default=_plain)
        if _PRIVATE_CHARACTER.search(sources):
            return None
    marked = _marked(template, messages, prompted, _Marks(source, "", messages), range(len(messages)), True)
    return None if marked is not None and printed_parts(messages, marked.text) else marked


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def attribute_messages(
    template: ChatTemplate, messages: Sequence[Message], text: str, prompted: bool
) -> MessageAttribution:
    """Find the pieces of all messages in `text`, their rendering (with a generation prompt if `prompted`)."""
    marks = _Marks(template.source, text, messages)
    printed = printed_parts(messages, text)
    chosen = [index for index in range(len(messages)) if index not in printed]
    for names in (True, False):
        marked = _marked(template, messages, prompted, marks, chosen, names)
        if marked is not None and marked.text == text:
            return marked.owners._replace(unknown=tuple(sorted(printed)), printed=tuple(sorted(printed)))
    owners = _one_by_one(template, messages, text, prompted, marks, chosen)
    return owners._replace(unknown=sorted({*owners.unknown, *printed}), printed=tuple(sorted(printed)))


def printed_parts(messages: Sequence[Message], text: str) -> set[int]:
    """Return the messages whose list of parts stands in `text` as Python prints it: the template takes no parts."""
    contents = {index: message.get("content") for index, message in enumerate(messages)}
    lists = {index: str(content) for index, content in contents.items() if isinstance(content, list) and content}
    beginnings = {written[:_BEGINNING] for written in lists.values()}
    if not any(beginning in text for beginning in beginnings):
        return set()
    return {index for index, written in lists.items() if written in text}


def _one_by_one(
    template: ChatTemplate, messages: Sequence[Message], text: str, prompted: bool, marks: _Marks, chosen: Iterable[int]
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

    _rewritten(message, collect, lambda _: collect, None, collect)
    return seen


class _Place(NamedTuple):
    """The place of a text: in a message (or its reasoning), or (unless None) in a call, as its name or arguments."""

    message: int
    call: int | None = None
    is_name: bool = False
    is_reasoning: bool = False


class _Marks:
    """The marks of one rendering: their characters, and the places where a text may be cut."""

    def __init__(self, source: str, text: str, messages: Sequence[Message]) -> None:
        taken = set(_PRIVATE_CHARACTER.findall(text))
        self.table: list[_Place] = []  # what each opening mark stands for
        self.written: list[int] = []  # how many segments have it
        # of each message: a mark for its words, one for its reasoning, and two for each of its calls
        count = 1 + sum(1 + _thinks(message) + 2 * len(_calls(message)) for message in messages)
        self.base = _PRIVATE
        while any(self.base <= ord(character) < self.base + count for character in taken):
            self.base += count
        self.close = chr(self.base + count - 1)
        self.pattern = re.compile(f"([{chr(self.base)}-{self.close}])")
        self.cut, self.cuts = _cut_patterns(source)

    def wrap(self, place: _Place) -> Wrap:
        """Return the function that marks the segments of a text with a new mark for the place."""
        opening = chr(self.base + len(self.table))
        number = len(self.table)
        self.table.append(place)
        self.written.append(0)
        is_cut, close, written = self.cut.search, self.close, self.written

        def wrapped(text: str) -> str:
            if is_cut(text) is not None:
                marked = self._in_segments(opening, text)
                written[number] += marked.count(close)
                return marked
            if not text or text.isspace():
                return text
            written[number] += 1
            return opening + text + close if text == text.strip() else self._segment(opening, text)

        return wrapped

    def _in_segments(self, opening: str, text: str) -> str:
        parts, last = [], 0
        for cut in self.cuts.finditer(text):
            parts += [self._segment(opening, text[last : cut.start()]), cut.group()]
            last = cut.end()
        return "".join([*parts, self._segment(opening, text[last:])])

    def _segment(self, opening: str, text: str) -> str:
        core = text.strip()
        if core == text:
            return f"{opening}{core}{self.close}" if core else ""
        at = text.index(core)
        return f"{text[:at]}{opening}{core}{self.close}{text[at + len(core) :]}" if core else text

    def wrap_call(self, message: int, is_name: bool, call: int) -> Wrap:
        """Return the function that marks the name or the arguments of a call."""
        return self.wrap(_Place(message, call, is_name))

    def read(self, rendered: str) -> tuple[str, list[tuple[int, int, _Place]]] | None:
        """Return the text without marks and (start, end, place) of its marked segments; None if one was cut in two."""
        parts = self.pattern.split(rendered)  # text, mark, text, mark, ..., text
        marks = parts[1::2]
        if len(marks) % 2 or any(mark != self.close for mark in marks[1::2]) or self.close in marks[::2]:
            return None
        ends = list(accumulate(map(len, parts[::2])))
        spans = [(ends[at], ends[at + 1], self.table[ord(marks[at]) - self.base]) for at in range(0, len(marks), 2)]
        return "".join(parts[::2]), spans


@lru_cache(maxsize=64)
def _cut_patterns(source: str) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Return patterns of a text's cuts: line ends, and the literals with which a template compares or splits texts.

    The second pattern takes the white space around too; the first is fast where there is nothing to cut.
    """
    literals = {match[2] or match[4] for match in _CUTS.finditer(source)}
    cuts = sorted((x for x in literals if x.strip() and not x.isalnum()), key=len, reverse=True)
    escaped = ["\n", *map(re.escape, cuts)]
    return re.compile("|".join(escaped)), re.compile("|".join(rf"\s*{cut}\s*" for cut in escaped))


def _marked(
    template: ChatTemplate,
    messages: Sequence[Message],
    prompted: bool,
    marks: _Marks,
    chosen: Iterable[int],
    names: bool,
) -> Marked | None:
    """Render with some messages marked and read the marks; return None if the template refuses or splits them."""
    changed = list(messages)
    marks.table.clear()
    marks.written.clear()
    for index in chosen:
        original, words = messages[index], marks.wrap(_Place(index))
        thoughts = words
        if _thinks(original):
            thoughts = marks.wrap(_Place(index, is_reasoning=True))
        if original.get("tool_calls"):
            name = partial(marks.wrap_call, index, True) if names else None
            changed[index] = _rewritten(original, words, partial(marks.wrap_call, index, False), name, thoughts)
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
    written: set[_Place] = set()
    counts: Counter[int] = Counter()
    for start, end, place in spans:
        message, call, is_name, is_reasoning = place
        if call is not None:
            if is_name and place in written:  # a name may come again, as that of the result
                continue
            written.add(place)
        elif not is_reasoning:
            counts[message] += 1
        pieces.append(MessageSpan(start, end, message))
    seen = {(place.message, place.call) for place in written}
    calls = {(place.message, place.call) for place in marks.table if place.call is not None} if names else set()
    lost = [
        place.message
        for place, due in zip(marks.table, marks.written, strict=True)
        if _lost(messages, place, due, counts)
    ]
    return Marked(text, MessageAttribution(pieces, (), sorted({message for message, _ in calls - seen}), (), lost))


def _lost(messages: Sequence[Message], place: _Place, due: int, counts: Mapping[int, int]) -> bool:
    """Return whether a message's words, in `due` segments, are not all written (of an assistant's, none)."""
    if not due or place.call is not None or place.is_reasoning:
        return False
    return counts[place.message] < (1 if messages[place.message].get("role") == "assistant" else due)


def _rewritten(
    message: Message,
    text: Wrap,
    argument: Callable[[int], Wrap],
    name: Callable[[int], Wrap] | None,
    reasoning: Wrap,
) -> Message:
    """Return the message with its texts, the arguments and (unless None) the names of its calls rewritten."""
    changed = _with_words(message, text, reasoning)
    if calls := _calls(message):
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


def _thinks(message: Message) -> bool:
    return not _REASONING.isdisjoint(message) and any(message.get(key) for key in REASONING_KEYS)


def _calls(message: Message) -> Sequence[Any]:
    calls = message.get("tool_calls") or ()
    return calls if isinstance(calls, list | tuple) else ()


def _part(part: Any, text: Wrap) -> Any:
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
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
