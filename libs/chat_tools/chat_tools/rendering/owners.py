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

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from chat_tools.rendering.template import ChatTemplate, Message, content_like, rendering_errors, template_errors, unused

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
WRITTEN_KEYS = ("content", *REASONING_KEYS, "tool_calls")
_PRIVATE = 0xF0000  # planes 15 and 16: no script has characters there
_PRIVATE_CHARACTER = re.compile("[\U000f0000-\U0010ffff]")
# What a template compares a text with, or cuts it at: marks must not stand inside or before it.
_CUTS = re.compile(r"""(?:split|startswith|endswith|replace)\(\s*(['"])(.+?)\1|(['"])([^'"\n]+)\3\s+(?:not\s+)?in\s""")
_LINE_END = r"\s*\n\s*"
Wrap = Callable[[str], str]


class Piece(NamedTuple):
    """Characters `start:end` of a rendering, which message number `message` holds."""

    start: int
    end: int
    message: int


class Owners(NamedTuple):
    """The pieces of a rendering, in order.

    `unknown` are the messages that have text but could not be found; `without_calls` those of whose tool calls the
    template leaves some out.
    """

    pieces: list[Piece]
    unknown: Sequence[int] = ()
    without_calls: Sequence[int] = ()

    def of(self, message: int) -> list[Piece]:
        """Return the pieces of one message."""
        return [piece for piece in self.pieces if piece.message == message]


def find_owners(template: ChatTemplate, messages: Sequence[Message], text: str, prompted: bool) -> Owners:
    """Find the pieces of all messages in `text`, their rendering (with a generation prompt if `prompted`)."""
    marks = _Marks(template.source, text, messages)
    everybody = range(len(messages))
    for names in (True, False):
        found = _marked(template, messages, text, prompted, marks, everybody, names)
        if found is not None:
            return found
    return _one_by_one(template, messages, text, prompted, marks)


def _one_by_one(
    template: ChatTemplate, messages: Sequence[Message], text: str, prompted: bool, marks: _Marks
) -> Owners:
    """Find the pieces of each message by a rendering of its own."""
    found: list[Piece] = []
    unknown: list[int] = []
    without_calls: list[int] = []
    for index, message in enumerate(messages):
        if not has_text(message) and not message.get("tool_calls"):
            continue
        alone = _marked(template, messages, text, prompted, marks, [index], True)
        alone = alone or _marked(template, messages, text, prompted, marks, [index], False)
        if alone is not None:
            found += alone.pieces
            without_calls += alone.without_calls
        elif (pieces := find_by_difference(template, messages, index, text, prompted)) is not None:
            found += pieces
        else:
            unknown.append(index)
    return Owners(_without_overlaps(found, messages), unknown, without_calls)


def find_by_difference(
    template: ChatTemplate, messages: Sequence[Message], index: int, text: str, prompted: bool
) -> list[Piece] | None:
    """Find a message by rendering another text in its place: one piece of all that differs; None if none can be found.

    The piece of a message without text is empty, and stands where its text would be.
    """
    message, mark = messages[index], unused([text])
    other = {**{k: v for k, v in message.items() if k not in WRITTEN_KEYS}, "content": content_like(message, mark)}
    if message.get("tool_calls"):  # without calls the results that follow may be rendered in another way
        other["tool_calls"] = [_renamed(call, mark) for call in message["tool_calls"]]
    try:
        changed = template.text([*messages[:index], other, *messages[index + 1 :]], prompted)
    except template_errors():
        return None
    before = common_prefix(text, changed)
    after = common_suffix(text[before:], changed[before:])
    if mark not in changed[before : len(changed) - after]:
        return None
    return [Piece(before, len(text) - after, index)]


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


def has_text(message: Message) -> bool:
    """Say whether a message holds anything that can be marked (names of calls not counted)."""
    return any(text.strip() for text in texts_of(message))


def texts_of(message: Message) -> list[str]:
    """List the texts that a message holds."""
    seen: list[str] = []

    def collect(text: str) -> str:
        seen.append(text)
        return text

    _rewritten(message, collect, lambda _: collect, None)
    return seen


class _Place(NamedTuple):
    """Where a text stands: in a message, and (unless None) in one of its calls, as its name or else its arguments."""

    message: int
    call: int | None = None
    is_name: bool = False


class _Marks:
    """The marks of one rendering: which characters they are, and where a text may be cut."""

    def __init__(self, source: str, text: str, messages: Sequence[Message]) -> None:
        taken = set(_PRIVATE_CHARACTER.findall(text))
        self.table: list[_Place] = []  # what each opening mark stands for
        # of each message: a mark for its words, and two for each of its calls
        count = 1 + sum(1 + 2 * len(_calls(message)) for message in messages)
        self.base = _PRIVATE
        while any(self.base <= ord(character) < self.base + count for character in taken):
            self.base += count
        self.close = chr(self.base + count - 1)
        self.pattern = re.compile(f"[{chr(self.base)}-{self.close}]")
        self.cuts = _cut_pattern(source)

    def wrap(self, place: _Place) -> Wrap:
        """Return what marks the segments of a text with a new mark that stands for the place."""
        opening, closing = chr(self.base + len(self.table)), self.close
        self.table.append(place)

        def segment(text: str) -> str:
            core = text.strip()
            if not core:
                return text
            at = text.index(core)
            return f"{text[:at]}{opening}{core}{closing}{text[at + len(core) :]}"

        def wrapped(text: str) -> str:
            parts, last = [], 0
            for cut in self.cuts.finditer(text):
                parts += [segment(text[last : cut.start()]), cut.group()]
                last = cut.end()
            return "".join([*parts, segment(text[last:])])

        return wrapped

    def read(self, rendered: str, text: str) -> list[tuple[int, int, _Place]] | None:
        """Return (start, end, place) of each marked segment of `text`; None if it is not `rendered` without marks."""
        spans: list[tuple[int, int, _Place]] = []
        plain: list[str] = []
        at = last = 0
        opened: int | None = None
        for match in self.pattern.finditer(rendered):
            between = rendered[last : match.start()]
            plain.append(between)
            at, last = at + len(between), match.end()
            if (opened is None) == (match.group() == self.close):
                return None  # the template cut a segment in two
            if opened is None:
                opened = ord(match.group()) - self.base
            else:
                spans.append((at - len(between), at, self.table[opened]))
                opened = None
        plain.append(rendered[last:])
        return spans if opened is None and "".join(plain) == text else None


@lru_cache(maxsize=64)
def _cut_pattern(source: str) -> re.Pattern[str]:
    """Match where a text is cut: at line ends, and at what a template's source compares texts with or cuts them at."""
    literals = {match[2] or match[4] for match in _CUTS.finditer(source)}
    cuts = sorted((x for x in literals if x.strip() and not x.isalnum()), key=len, reverse=True)
    return re.compile("|".join([_LINE_END, *(rf"\s*{re.escape(cut)}\s*" for cut in cuts)]))


def _marked(
    template: ChatTemplate,
    messages: Sequence[Message],
    text: str,
    prompted: bool,
    marks: _Marks,
    chosen: Iterable[int],
    names: bool,
) -> Owners | None:
    """Render with some messages marked and read the marks; None if they change what the template writes."""
    changed = list(messages)
    marks.table.clear()
    for index in chosen:

        def argument(call: int, index: int = index) -> Wrap:
            return marks.wrap(_Place(index, call))

        def name(call: int, index: int = index) -> Wrap:
            return marks.wrap(_Place(index, call, True))

        changed[index] = _rewritten(messages[index], marks.wrap(_Place(index)), argument, name if names else None)
    try:
        rendered = template.text(changed, prompted)
    except rendering_errors():
        return None
    spans = marks.read(rendered, text)
    if spans is None:
        return None
    pieces: list[Piece] = []
    written: set[_Place] = set()
    for start, end, place in spans:
        if not (place.is_name and place in written):  # a name may come again, as that of the result
            pieces.append(Piece(start, end, place.message))
        written.add(place)
    seen = {(place.message, place.call) for place in written}
    calls = {(place.message, place.call) for place in marks.table if place.call is not None}
    return Owners(pieces, (), sorted({message for message, call in calls - seen if names}))


def _rewritten(
    message: Message, text: Wrap, argument: Callable[[int], Wrap], name: Callable[[int], Wrap] | None
) -> Message:
    """Return the message with its texts, the arguments and (unless None) the names of its calls rewritten."""
    changed = dict(message)
    for key in ("content", *REASONING_KEYS):
        value = message.get(key)
        if isinstance(value, str):
            changed[key] = text(value)
        elif isinstance(value, list):
            changed[key] = [_part(part, text) for part in value]
        elif isinstance(value, Mapping):
            changed[key] = _value(value, text)
    if calls := _calls(message):
        changed["tool_calls"] = [_call(call, argument(i), name and name(i)) for i, call in enumerate(calls)]
    return changed


def _calls(message: Message) -> Sequence[Any]:
    calls = message.get("tool_calls")
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


def _renamed(call: Any, mark: str) -> Any:
    """Return the call with other arguments (and the id that a tool message may ask for)."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function", call), Mapping):
        return call
    function = call.get("function", call)
    given = function.get("arguments")
    changed = {**function, "arguments": dict.fromkeys(given or [mark], mark) if isinstance(given, Mapping) else mark}
    return {**call, "function": changed} if "function" in call else changed


def _without_overlaps(pieces: list[Piece], messages: Sequence[Message]) -> list[Piece]:
    """Order pieces that were found one by one; where two overlap, the assistant's gives way."""
    pieces.sort()
    kept: list[Piece] = []
    for piece in pieces:
        while kept and piece.start < kept[-1].end:
            assistant = messages[kept[-1].message].get("role") == "assistant"
            if assistant or messages[piece.message].get("role") != "assistant":
                previous = kept.pop()
                if previous.start < piece.start:
                    kept.append(Piece(previous.start, piece.start, previous.message))
                    break
            else:
                piece = Piece(kept[-1].end, max(piece.end, kept[-1].end), piece.message)
        kept.append(piece)
    return kept
