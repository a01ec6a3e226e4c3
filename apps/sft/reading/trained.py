"""Which tokens of a conversation are trained: by roles, the last turn, the completion or all, and by messages' marks.

A token of several owners is trained for none: what an assistant wrote is proven by rendering (`chat_tools.render`), the
text of other roles is theirs by the same proof, and what a mark takes out takes every token with it that touches it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from apps.sft.reading.columns import TrainOn as TrainOn
from chat_tools import Rendered
from chat_tools.rendering.render import encode


@dataclass(frozen=True, slots=True)
class Trained:
    """The choice for one conversation: `whole` rows from message `first` on but for `left_out`, else `messages`."""

    messages: frozenset[int] = frozenset()
    left_out: frozenset[int] = frozenset()
    whole: bool = False
    first: int = 0


def trained_of(
    roles: Sequence[str], train_on: Sequence[TrainOn], marks: Sequence[bool | None] = (), completes: int | None = None
) -> Trained:
    """Return what is trained of a conversation with messages of these roles; see `Conversation` for the others.

    Raises:
        ValueError: a message is marked to be trained that `train_on` leaves out, or there is no completion.
    """
    given = {number: mark for number, mark in enumerate(marks) if mark is not None}
    left_out = frozenset(number for number, mark in given.items() if not mark)
    if "all" in train_on:
        return Trained(left_out=left_out, whole=True)
    if "completion" in train_on:
        if completes is None:
            raise ValueError("--train-on completion goes with rows of a prompt and its completion")
        return Trained(left_out=left_out, whole=True, first=completes)
    assistants = [number for number, role in enumerate(roles) if role == "assistant"]
    if "last" in train_on:
        chosen = frozenset(assistants[-1:])
    else:
        chosen = frozenset(n for n, role in enumerate(roles) if role in train_on and n >= (completes or 0))
        for number, mark in given.items():
            if mark and roles[number] not in train_on:
                raise ValueError(
                    f"message {number + 1}, of role {roles[number]!r}, is marked to be trained, which --train-on "
                    f"{' '.join(train_on)} leaves out: add {roles[number]} to --train-on, or remove the mark"
                )
    return Trained(chosen - left_out)


def mask_of(tokenizer: Any, rendered: Rendered, trained: Trained | None) -> list[bool]:
    """Return a mask of the trained tokens of a rendered conversation; None for all that the assistant wrote.

    Raises:
        ValueError: the tokens of the rendered text are not those of the conversation.
    """
    if trained is None:
        return rendered.assistant_mask
    mask = [False] * len(rendered.ids)
    for span in rendered.spans:
        if span.message in trained.messages:
            mask[span.token_start : span.token_end] = [True] * (span.token_end - span.token_start)
    others = {n for n in trained.messages if rendered.messages[n].get("role") != "assistant"}
    if not others and not trained.whole:
        return mask
    ids, offsets = encode(tokenizer, rendered.text)
    if ids != rendered.ids:
        raise ValueError("the text of the conversation has other tokens alone")
    if trained.whole:
        return _whole(rendered, offsets, trained)
    for start, end in _texts(rendered, others):
        for place, (first, last) in enumerate(offsets):
            if start <= first and last <= end and first < last:
                mask[place] = True
    return mask


def _whole(rendered: Rendered, offsets: Sequence[tuple[int, int]], trained: Trained) -> list[bool]:
    """Return a mask of all tokens from a message on, but for those that touch a message that is left out."""
    begin = 0
    if trained.first:
        begin = min((owner.start for owner in rendered.owners if (owner.message or 0) >= trained.first), default=-1)
        if begin < 0:
            raise ValueError("the completion is nowhere in the rendered conversation")
    mask = [first >= begin for first, _ in offsets]
    for start, end in _texts(rendered, trained.left_out):
        for place, (first, last) in enumerate(offsets):
            if first < end and last > start:
                mask[place] = False
    return mask


def _texts(rendered: Rendered, messages: set[int] | frozenset[int]) -> list[tuple[int, int]]:
    """Return the characters of messages: from the first that is a message's own to its last, less what others own."""
    texts: list[tuple[int, int]] = []
    for number in sorted(messages):
        own = [owner for owner in rendered.owners if owner.message == number]
        if not own:
            continue
        start, end = own[0].start, own[-1].end
        for owner in rendered.owners:
            if owner.message not in (None, number) and start <= owner.start < end:
                texts.append((start, owner.start))
                start = owner.end
        texts.append((start, end))
    return texts
