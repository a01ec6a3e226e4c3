"""Where an assistant's turn ends: all that a sampler has to produce behind its words, proven by a shorter rendering.

Strategy
1. The conversation up to the turn is rendered, and what stands behind the turn's last word there is compared with what
   stands there in the whole: both begin with the end of the turn. It ends with the first token that stops the model.
2. Where they begin differently, the template ends earlier turns in another way (gpt-oss), or in none: then a stop token
   with which the next message begins ends the turn (GLM-4.5: that is what the model samples).
3. What the template writes behind the end, up to the next message's words, is remembered by the shape of the turn: a
   turn of this shape before the same text ends where it begins.
4. A turn whose end cannot be told so is not trained. Where those of several turns of one shape could not be told, the
   others of the conversation are not tried.

The memory lasts as long as the tokenizer, so that a dataset's rows need few renderings besides their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from chat_tools.rendering.message_attribution import attribute_messages
from chat_tools.rendering.replaced_messages import (
    MAX_FAILURES,
    WRITTEN_KEYS,
    NamelessText,
    common_prefix,
    find_by_difference,
    without_names,
)
from chat_tools.rendering.template import ChatTemplate, Message, content_like, rendering_errors
from chat_tools.rendering.turn_delimiters import TurnDelimiters, added_tokens, checked_ends, last_token, token_start

_MOST = 4096  # shapes whose ends are remembered of a template
_MOST_OF_SHAPE = 64


class Turn(NamedTuple):
    """A turn in a rendering: its last words end at `start`, and the words of others begin at `upper`.

    `last` is False for the calls of a turn whose results stand between them and its words. `kinds` are those of the
    messages (`kinds_of`), if they are known; `failures` counts, by shape, the turns whose end could not be told.
    """

    messages: Sequence[Message]
    number: int
    text: str
    prompted: bool
    start: int
    upper: int
    last: bool
    kinds: Sequence[tuple[Any, ...]] = ()
    failures: Counter[Any] | None = None


class _Ending(NamedTuple):
    """The end of turns of one shape: its last token (or character), and what the template writes behind it."""

    mark: str
    rest: str

    def length(self, behind: NamelessText) -> int | None:
        """Return the length of the end in what stands behind a turn's words, None if it is another one's."""
        text = behind.text
        if not text.endswith(self.mark + self.rest) or (not self.mark and len(self.rest) != len(text)):
            return None
        return behind.length(len(text) - len(self.rest))


def end_of_turn(
    template: ChatTemplate, delimiters: TurnDelimiters, turn: Turn, known: dict[Any, Any] | None = None
) -> int | None:
    """Return where a turn ends in its rendering; None if that cannot be told. `known` are the `checked_ends`."""
    behind = turn.text[turn.start : turn.upper]
    if turn.number == len(turn.messages) - 1 and turn.last and not turn.prompted:
        return turn.start + _of_last(delimiters, behind)
    known = checked_ends(template, turn.messages[turn.number]) if known is None else known
    shape = _shape(turn)
    endings: list[_Ending] = known.setdefault(shape, [])
    forms: list[NamelessText] = []
    for form in _forms(behind, turn.messages[max(0, turn.number - 1) : turn.number + 2]):
        forms.append(form)
        length = _known_length(endings, form)
        if length is not None:
            return turn.start + length
    failures = Counter() if turn.failures is None else turn.failures
    length = _proven(template, delimiters, turn, behind) if failures[shape] < MAX_FAILURES else None
    if length is None:
        failures[shape] += 1
        return None
    if len(known) > _MOST:
        known.clear()
    mark = last_token(behind[:length], added_tokens(template.tokenizer))
    places = [(form, form.place(length)) for form in forms]
    del endings[: max(0, len(endings) - _MOST_OF_SHAPE)]
    endings += [_Ending(mark, form.text[place:]) for form, place in places if place is not None]
    return turn.start + length


def _forms(behind: str, around: Sequence[Message]) -> Iterator[NamelessText]:
    """Yield what stands behind a turn as it is, without names, without numbers: each where it differs."""
    yield NamelessText(behind)
    nameless = without_names(behind, around)
    if nameless.names:
        yield nameless
    counted = without_names(behind, around, numbers=True)
    if len(counted.names) > len(nameless.names):
        yield counted


def _known_length(endings: Sequence[_Ending], behind: NamelessText) -> int | None:
    return next((length for ending in endings if (length := ending.length(behind)) is not None), None)


def _of_last(delimiters: TurnDelimiters, behind: str) -> int:
    """Return the length of the end of the last turn, behind which the template writes no more than its separator."""
    stop = delimiters.first_stop(behind, 0, len(behind))
    whole = max((end for end in delimiters.ends if behind.startswith(end)), key=len, default=None)
    return stop[1] if stop else len(behind.rstrip() if whole is None else whole)


def kinds_of(messages: Sequence[Message]) -> list[tuple[Any, ...]]:
    """Return the role and the kinds of text of each message."""
    return [(m.get("role"), *[key for key in WRITTEN_KEYS if m.get(key)]) for m in messages]


def _shape(turn: Turn) -> tuple[Any, ...]:
    """Return the shape of a turn: the kinds of the messages around it."""
    at, kinds = turn.number, turn.kinds or kinds_of(turn.messages)
    return at == 0, turn.last, turn.prompted and at == len(kinds) - 1, *kinds[max(0, at - 1) : at + 2]


def _proven(template: ChatTemplate, delimiters: TurnDelimiters, turn: Turn, behind: str) -> int | None:
    """Return the length of the end, found by rendering the conversation up to the turn."""
    alone = _behind_alone(template, turn)
    stop = delimiters.first_stop(behind, 0, len(behind))
    whole = max((end for end in delimiters.ends if behind.startswith(end)), key=len, default="")
    if alone is None:  # the template refuses an answer as the last message, or writes it in another way
        if stop is not None and (not behind[: stop[0]].strip() or turn.messages[turn.number].get("tool_calls")):
            return stop[1]
        return None if behind.strip() and not whole else len(whole)
    shared = token_start(behind, common_prefix(behind, alone), added_tokens(template.tokenizer))
    rest = alone[shared:].strip()
    if stop is not None and stop[1] <= shared:
        return stop[1]
    if not behind[:shared].strip():
        if whole and rest:  # another token stands in the place of the one that ends the last turn
            return len(whole)
        if stop is not None and not behind[: stop[0]].strip():
            return stop[1]
        without = not rest or behind.strip() in ("", delimiters.prompt.strip())  # no end, here or ever
        return 0 if without else None
    if rest and not delimiters.opening.rstrip().endswith(rest):  # they part within the turn
        return None
    if stop is not None and not behind[shared : stop[0]].strip():
        return stop[1]
    return len(behind[:shared].rstrip())


def _behind_alone(template: ChatTemplate, turn: Turn) -> str | None:
    """Return what the template writes behind the turn's last words where nothing follows it; None if it refuses."""
    index, message = turn.number, turn.messages[turn.number]
    if not turn.last:  # its calls alone: the words stand behind the results
        message = {**message, "content": content_like(message, "")}
    shorter = [*turn.messages[:index], message]
    try:
        text = template.trial(shorter)
    except rendering_errors():
        return None
    owned = attribute_messages(template, shorter, text, False).pieces
    mine = [piece.end for piece in owned if piece.message == index]
    mine = mine or [piece.end for piece in find_by_difference(template, shorter, index, text, False) or ()]
    return text[max(mine) :] if mine else None
