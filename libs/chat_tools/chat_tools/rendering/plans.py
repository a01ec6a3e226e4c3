"""Rows of one shape: what a template writes around their texts, and which of it is trained, is found out once.

Strategy
1. A shape is a conversation without its texts: roles, keys, numbers. At the second row of a shape the template renders
   it with a character of its own in the place of each text, which tells where each text goes.
2. A later row's rendering is then foreseen. It has to be the text that the template does write, character for
   character: then the marked rendering and the search for regions are left out. A row of which another text was
   foreseen (the template cuts or escapes one of its texts) is rendered as any other.
3. Nothing is foreseen of long conversations, which seldom share a shape, nor of texts with white space around them or
   with what the template itself looks for.

Invariant (tests): what a plan gives is what rendering with marks gives.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

from chat_tools.rendering.cached_template import PlainMessages
from chat_tools.rendering.masks import Region, Regions
from chat_tools.rendering.message_attribution import MessageAttribution, rewritten
from chat_tools.rendering.replaced_messages import MessageSpan
from chat_tools.rendering.template import ChatTemplate, rendering_errors
from chat_tools.rendering.text_marks import PRIVATE_CHARACTER, cut_patterns
from chat_tools.rendering.turn_delimiters import checked_ends

_MOST_MESSAGES = 12
_MOST_PLANS = 1024  # of a template
_FIRST = 0x100000  # the character in the place of the first text
_STAND_IN = re.compile("([\U00100000-\U0010ffff])")
_LINE_END = re.compile(r"\s*\n\s*")


class Shape(NamedTuple):
    """A conversation without its texts (`key`), these in order, and of each its message and whether it names a call."""

    key: Any
    texts: list[str]
    owners: list[tuple[int, bool]]


class Plan(NamedTuple):
    """What is written around the texts `order`, and the regions.

    A region is its message, the place in `order` of its first and last text, and how far from the beginning of the one
    and the end of the other it begins, has its turn's end, and ends.
    """

    between: list[str]
    order: list[int]
    regions: list[tuple[int, int, int, int, int, int]]


def shape_of(template: ChatTemplate, messages: Sequence[Any]) -> Shape | None:
    """Return the shape of a conversation; None for one of which nothing is foreseen."""
    if len(messages) > _MOST_MESSAGES or not isinstance(messages, PlainMessages):
        return None
    shape = Shape([], [], [])
    for number, message in enumerate(messages):
        shape.key.append(_without_texts(message, number, shape))
    looked_for = cut_patterns(template.source)[2].search
    for text in shape.texts:
        if text != text.strip() or looked_for(text) or PRIVATE_CHARACTER.search(text):
            return None
    return shape._replace(key=(template.stops, *shape.key))


def _without_texts(message: dict[str, Any], number: int, shape: Shape) -> Any:
    """Return what tells a message from others but for its texts, which `shape` gets. An empty one tells it."""
    if len(message) == 2 and type(content := message.get("content")) is str and content:
        shape.texts.append(content)
        shape.owners.append((number, False))
        return message.get("role")

    def take(text: str, is_name: bool = False) -> str:
        if not text:
            return text
        shape.texts.append(text)
        shape.owners.append((number, is_name))
        return "\0"

    return repr(rewritten(message, take, lambda _: take, lambda _: lambda text: take(text, True), take))


def plan_of(template: ChatTemplate, shape: Shape, prompted: bool) -> Plan | None:
    """Return the plan of a shape, None where there is none (yet)."""
    plan = _plans(template, prompted).get(shape.key)
    return plan if isinstance(plan, Plan) else None


def save_plan(
    template: ChatTemplate, messages: Sequence[Any], shape: Shape, prompted: bool, text: str, turns: Regions
) -> None:
    """Keep the plan of a shape from the regions in a conversation's `text`, if it was seen before."""
    plans = _plans(template, prompted)
    if shape.key in plans:
        if plans[shape.key] == "seen":
            plans[shape.key] = _plan(template, messages, shape, prompted, text, turns)
    else:
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        plans[shape.key] = "seen"


def _plans(template: ChatTemplate, prompted: bool) -> dict[Any, Plan | str | None]:
    known: dict[Any, Plan | str | None] = checked_ends(template, {}).setdefault(("plans", prompted), {})
    return known


def _plan(
    template: ChatTemplate, messages: Sequence[Any], shape: Shape, prompted: bool, text: str, turns: Regions
) -> Plan | None:
    owners = turns.owners
    if turns.problems or owners.unknown or owners.without_calls or owners.printed or owners.lost:
        return None
    stand_ins = map(chr, range(_FIRST, _FIRST + len(shape.texts)))

    def take(text: str) -> str:
        return text and next(stand_ins)

    changed = PlainMessages(dict(rewritten(m, take, lambda _: take, lambda _: take, take)) for m in messages)
    try:
        parts = _STAND_IN.split(template.trial(changed, prompted))
    except rendering_errors():
        return None
    order = [ord(stand_in) - _FIRST for stand_in in parts[1::2]]
    plan = Plan(parts[::2], order, [])
    if set(order) != set(range(len(shape.texts))) or _written(plan, shape) != text:
        return None
    starts, ends = _places(plan, shape)
    for region in turns.regions:
        first = next((at for at, end in enumerate(ends) if end > region.start), None)
        last = next((at for at in reversed(range(len(starts))) if starts[at] < region.end), None)
        if first is None or last is None or region.start > starts[first] or region.body_end < ends[last]:
            return None
        begins, stops, closes = region.start - starts[first], region.body_end - ends[last], region.end - ends[last]
        plan.regions.append((region.message, first, last, begins, stops, closes))
    foreseen = regions_of(plan, shape, text, turns.stops_known)
    same = foreseen is not None and (foreseen.regions, foreseen.owners.pieces) == (turns.regions, owners.pieces)
    return plan if same else None


def _written(plan: Plan, shape: Shape) -> str:
    texts = [shape.texts[number] for number in plan.order]
    return "".join(chain.from_iterable(zip(plan.between, [*texts, ""], strict=True)))


def _places(plan: Plan, shape: Shape) -> tuple[list[int], list[int]]:
    """Return where the texts of a foreseen rendering begin and end."""
    starts: list[int] = []
    ends: list[int] = []
    at = 0
    for before, number in zip(plan.between, plan.order, strict=False):
        starts.append(at := at + len(before))
        ends.append(at := at + len(shape.texts[number]))
    return starts, ends


def regions_of(plan: Plan, shape: Shape, text: str, stops_known: bool) -> Regions | None:
    """Return the regions of a conversation in its rendering; None where another text was foreseen."""
    if _written(plan, shape) != text:
        return None
    starts, ends = _places(plan, shape)
    pieces: list[MessageSpan] = []
    named: set[int] = set()
    for start, end, number in zip(starts, ends, plan.order, strict=True):
        message, is_name = shape.owners[number]
        if is_name:
            if number in named:  # a name may come again, as that of the result
                continue
            named.add(number)
        for line_end in _LINE_END.finditer(text, start, end):
            pieces.append(MessageSpan(start, line_end.start(), message))
            start = line_end.end()
        pieces.append(MessageSpan(start, end, message))
    regions = [
        Region(message, starts[first] + begins, ends[last] + stops, ends[last] + closes)
        for message, first, last, begins, stops, closes in plan.regions
    ]
    return Regions(regions, [], MessageAttribution(pieces), stops_known)
