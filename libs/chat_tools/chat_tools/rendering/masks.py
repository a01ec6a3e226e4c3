"""Which characters of a rendered conversation are trained: the regions of its assistant turns.

Strategy
1. `message_attribution` says whose each character is. An assistant turn's own characters, as long as nobody else's come
   between them, are one piece (a Gemma 4 turn with calls has two: its results stand between its calls and its words).
2. A region begins where the generation prompt ends (or as much of it as history keeps), looked for between the last
   character of anybody else and the turn's first. Where the prompt is not found (a model that goes on after a result
   in the same turn), it begins where the rendering of the messages before it, prompt included, ends.
3. It ends where `turn_end` proves that the turn ends: with the whole of what a sampler has to produce.
4. What a shorter rendering told of one turn (2, 3) holds for those of the same shape within the same text of the
   template (names and ids of calls apart), so that the number of renderings is that of shapes, not of turns. Turns
   without text are found by one rendering with a text in each of them.
5. A turn whose region cannot be told so is not trained, and a problem says so.

Invariants (tests): a region holds no character of another message; regions are in order and do not overlap; a region of
a turn that ends with a stop token holds it; an injected marker in anybody's text moves no border.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from chat_tools.rendering.message_attribution import MessageAttribution, attribute_messages, texts_of
from chat_tools.rendering.replaced_messages import (
    WRITTEN_KEYS,
    MessageSpan,
    common_prefix,
    find_together,
    without_names,
)
from chat_tools.rendering.template import ChatTemplate, Message, template_errors
from chat_tools.rendering.turn_delimiters import (
    TurnDelimiters,
    added_tokens,
    checked_ends,
    find_turn_delimiters,
    token_start,
)
from chat_tools.rendering.turn_end import Turn, end_of_turn, kinds_of


class Region(NamedTuple):
    """Characters `start:end` that message number `message` wrote; the end of its turn begins at `body_end`."""

    message: int
    start: int
    body_end: int
    end: int


class Regions(NamedTuple):
    """The assistants' regions in a rendering, in order; the turns that could not be proven; the owners of pieces.

    `stops_known` says that the model's stop tokens were given.
    """

    regions: list[Region]
    problems: list[str]
    owners: MessageAttribution
    stops_known: bool = False


CALLS_LEFT_OUT = "the template leaves out some of its tool calls"
PRINTED = "the template takes no parts and writes their list as Python prints it: give the content as one text"
LOST = "the template leaves out text of it"
_UNTOLD = "where the template writes it cannot be told"


_Shape = tuple[str, bool, tuple[tuple[Any, ...], ...]]


class _Seen(NamedTuple):
    """The state of a search: whether a generation prompt ends the rendering, and what shorter renderings told.

    `prompts` (lengths of the generation prompt) are by the template's text there, whether a user spoke before, and the
    shapes of the turn and those before it; `ends` are the `checked_ends`, `kinds` those of the messages, `failures` the
    turns by shape whose end could not be told.
    """

    prompted: bool
    prompts: dict[_Shape, int | None]
    ends: dict[Any, Any] | None = None
    kinds: Sequence[tuple[Any, ...]] = ()
    failures: Counter[Any] | None = None


class _Bounds(NamedTuple):
    """A piece of a turn between what others own: nothing of it can lie outside `lower:upper`."""

    piece: MessageSpan
    lower: int
    upper: int
    first: bool
    last: bool


def find_regions(
    template: ChatTemplate,
    messages: Sequence[Message],
    text: str,
    prompted: bool,
    owners: MessageAttribution | None = None,
) -> Regions:
    """Find the regions of all assistant messages in `text`, their rendering (whose `owners` may be known)."""
    owners = owners or attribute_messages(template, messages, text, prompted)
    bounds = _bounded(sorted([*owners.pieces, *_printed(messages, owners.printed, text)]), len(text))
    regions: list[Region] = []
    problems: list[str] = []
    delimiters: TurnDelimiters | None = None
    seen = _Seen(prompted, {}, failures=Counter())
    given_up = {*owners.without_calls, *owners.unknown, *owners.lost}
    lost = [i for i, m in enumerate(messages) if m.get("role") == "assistant" and i not in bounds and i not in given_up]
    alone = find_together(template, messages, lost, text, prompted) if lost else {}
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        if delimiters is None:
            delimiters = find_turn_delimiters(template, message)
            seen = seen._replace(ends=checked_ends(template, message), kinds=kinds_of(messages))
        own = bounds.get(index, ())
        if index in alone:
            own = [_among(owners.pieces, alone[index], len(text))]
        own_regions = _turn(template, messages, index, text, delimiters, owners, own, seen)
        if isinstance(own_regions, str):
            problems.append(own_regions)
        else:
            regions += own_regions
    regions.sort(key=lambda region: region.start)
    others = [index for index in owners.unknown if messages[index].get("role") != "assistant"]
    regions = _without(regions, [words for index in others for words in texts_of(messages[index])], text)
    problems += [f"message {index}: {PRINTED if index in owners.printed else _UNTOLD}" for index in others]
    problems += [f"message {i}: {LOST}" for i in owners.lost if messages[i].get("role") != "assistant"]
    return Regions(regions, problems, owners, template.stops is not None)


def _turn(
    template: ChatTemplate,
    messages: Sequence[Message],
    index: int,
    text: str,
    delimiters: TurnDelimiters,
    owners: MessageAttribution,
    own: Sequence[_Bounds],
    seen: _Seen,
) -> list[Region] | str:
    """Return the regions of one assistant message, or why they cannot be proven."""
    if index in owners.without_calls:
        return f"message {index}: {CALLS_LEFT_OUT}"
    if index in owners.printed:
        return f"message {index}: {PRINTED}"
    if index in owners.lost:
        return f"message {index}: {LOST}"
    overlapping = any(piece.start < lower or piece.end > upper for piece, lower, upper, _, _ in own)
    if index in owners.unknown or not own or overlapping:
        return f"message {index}: the template does not render its content apart from what follows"
    regions: list[Region] = []
    for bounds in own:
        start = _start(template, messages, index, text, delimiters, bounds, seen)
        if start is None:
            return f"message {index}: its beginning cannot be told from the message before"
        piece, _, upper, _, last = bounds
        turn = Turn(messages, index, text, seen.prompted, max(piece.end, start), upper, last, seen.kinds, seen.failures)
        end = end_of_turn(template, delimiters, turn, seen.ends)
        if end is None:
            return f"message {index}: where its turn ends cannot be told"
        body_end = max(start, end - len(delimiters.end_of(text[start:end])))
        regions.append(Region(index, start, body_end, end))
    return regions


def _among(pieces: Sequence[MessageSpan], own: MessageSpan, length: int) -> _Bounds:
    """Return a piece between those of others."""
    at = bisect_left(pieces, own)
    lower = pieces[at - 1].end if at else 0
    return _Bounds(own, lower, pieces[at].start if at < len(pieces) else length, True, True)


def _bounded(pieces: Sequence[MessageSpan], length: int) -> dict[int, list[_Bounds]]:
    """Join the pieces of each message between which nobody else owns a character, with the bounds around them.

    `pieces` are in order; the result is by message. Linear in their number.
    """
    runs: list[MessageSpan] = []
    for piece in pieces:
        if runs and runs[-1].message == piece.message:
            runs[-1] = MessageSpan(runs[-1].start, piece.end, piece.message)
        else:
            runs.append(piece)
    by_message: dict[int, list[_Bounds]] = {}
    lower = 0
    for number, joined in enumerate(runs):
        upper = runs[number + 1].start if number + 1 < len(runs) else length
        same = by_message.setdefault(joined.message, [])
        if same:
            same[-1] = same[-1]._replace(last=False)
        same.append(_Bounds(joined, lower, upper, not same, True))
        lower = max(lower, joined.end)
    return by_message


def _printed(messages: Sequence[Message], indices: Sequence[int], text: str) -> Iterator[MessageSpan]:
    """Yield where the lists of these messages are printed: nobody's turn reaches over them."""
    end = 0
    for index in indices:
        written = str(messages[index]["content"])
        start = text.find(written, end)
        start = text.find(written) if start < 0 else start  # not in order
        end = max(end, start + len(written))
        yield MessageSpan(start, start + len(written), index)


def _start(
    template: ChatTemplate,
    messages: Sequence[Message],
    index: int,
    text: str,
    delimiters: TurnDelimiters,
    bounds: _Bounds,
    seen: _Seen,
) -> int | None:
    """Return the end of the generation prompt (or of its part that history keeps); None if it is not certain."""
    piece, lower, _, first, _ = bounds
    if not first or lower == piece.start:
        return piece.start
    if not delimiters.prompt and delimiters.opening and text.startswith(delimiters.opening, lower, piece.start):
        return lower + len(delimiters.opening)  # the turn begins without any header
    for length in delimiters.prompt_cuts:
        if 3 * length < len(delimiters.prompt):
            break
        at = text.rfind(delimiters.prompt[:length], lower, piece.start)
        if at >= 0:
            return at + length
    refused = None if delimiters.prompt else piece.start
    if index == 0:  # nothing comes before it, and templates are not applied to nothing
        return refused
    here = text[lower : piece.start]
    nameless = without_names(here, messages[max(0, index - 2) : index + 1], numbers=True)
    shape = _shape(messages, index, nameless.text)
    if shape in seen.prompts:
        known = seen.prompts[shape]
        shared = None if known is None else nameless.length(known)
    else:
        shared = _shared_with_prompt(template, messages[:index], here)
        known = None if shared is None else nameless.place(shared)
        if shared is None or known is not None:
            seen.prompts[shape] = known
    if shared:
        return lower + shared
    return refused if shared is None else None


def _shape(messages: Sequence[Message], index: int, here: str) -> _Shape:
    """Return the shape of a turn beside the template's text `here`: what a shorter rendering shows is the same."""
    after_user = any(message.get("role") == "user" for message in messages[:index])
    near = messages[max(0, index - 2) : index + 1]
    return here, after_user, tuple((m.get("role"), *(key for key in WRITTEN_KEYS if m.get(key))) for m in near)


def _shared_with_prompt(template: ChatTemplate, before: Sequence[Message], here: str) -> int | None:
    """Return the length of the generation prompt after the messages in `here`; None if the template refuses them."""
    try:
        text = template.trial(before, add_generation_prompt=True)
    except template_errors():
        return None
    owners = attribute_messages(template, before, text, True)
    pieces = [*owners.pieces, *_printed(before, owners.printed, text)]
    tail = text[max((owned.end for owned in pieces), default=0) :]
    return token_start(here, common_prefix(tail, here), added_tokens(template.tokenizer))


def _without(regions: Sequence[Region], texts: Sequence[str], text: str) -> list[Region]:
    """Return the regions that hold no line of the texts."""
    lines = {line.strip() for text_of_other in texts for line in text_of_other.splitlines() if line.strip()}
    trained = "\n".join(text[r.start : r.end] for r in regions) if lines else ""
    lines = {line for line in lines if line in trained}  # few, and most often none
    return [r for r in regions if not any(line in text[r.start : r.end] for line in lines)]
