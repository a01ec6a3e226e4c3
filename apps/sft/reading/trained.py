"""Which tokens of a conversation are trained: by roles, the last turn, the completion or all, and by messages' marks.
How much: by marks and for reasoning.

A token of several owners is trained for none: what an assistant wrote is proven by rendering (`chat_tools.render`), the
text of other roles is theirs by the same proof, and what a mark takes out takes every token with it that touches it.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import lt
from typing import Any

from apps.sft.reading.columns import TrainOn as TrainOn
from chat_tools import Rendered, reasoning_mask
from chat_tools.rendering.token_places import Offsets, encode


@dataclass(frozen=True, slots=True)
class Trained:
    """The choice for one conversation: `whole` rows from message `first` on but for `left_out`, else `messages`.

    `weights`: of messages, where it is not 1.
    """

    messages: frozenset[int] = frozenset()
    left_out: frozenset[int] = frozenset()
    whole: bool = False
    first: int = 0
    weights: Mapping[int, float] = field(default_factory=dict)


def trained_of(
    roles: Sequence[str], train_on: Sequence[TrainOn], marks: Sequence[float | None] = (), completes: int | None = None
) -> Trained:
    """Return what is trained of a conversation with messages of these roles; see `Conversation` for the others.

    Raises:
        ValueError: a message is marked to be trained that `train_on` leaves out, or there is no completion.
    """
    given = {number: mark for number, mark in enumerate(marks) if mark is not None}
    left_out = frozenset(number for number, mark in given.items() if not mark)
    weights = {number: mark for number, mark in given.items() if mark not in (0, 1)}
    if "all" in train_on:
        return Trained(left_out=left_out, whole=True, weights=weights)
    if "completion" in train_on:
        if completes is None:
            raise ValueError("--train-on completion goes with rows of a prompt and its completion")
        return Trained(left_out=left_out, whole=True, first=completes, weights=weights)
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
    return Trained(chosen - left_out, weights={number: weights[number] for number in chosen & weights.keys()})


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
        first, last = bisect_left(offsets.starts, start), bisect_right(offsets.ends, end)
        if first < last:
            mask[first:last] = map(lt, offsets.starts[first:last], offsets.ends[first:last])
    return mask


def mask_and_weights(
    tokenizer: Any, rendered: Rendered, trained: Trained | None, reasoning: float = 1.0, form: str | None = None
) -> tuple[list[bool], list[float]]:
    """Return the mask of the trained tokens (`mask_of`) and their weights, none where all of them are 1.

    `reasoning`: what the weights of reasoning are multiplied by; `form`: the format that tells it. A token of weight 0
    is not trained, and counts in no mean.
    """
    mask = mask_of(tokenizer, rendered, trained)
    marked = {} if trained is None else trained.weights
    if not marked and reasoning == 1:
        return mask, []
    weights = [float(on) for on in mask]
    for number, weight in marked.items():
        own = mask_of(tokenizer, rendered, Trained(frozenset({number})))
        weights = [weight if w and o else w for w, o in zip(weights, own, strict=True)]
    if reasoning != 1:
        thought = reasoning_mask(rendered, form)
        weights = [w * reasoning if t else w for w, t in zip(weights, thought, strict=True)]
    return [w > 0 for w in weights], [] if set(weights) <= {0.0, 1.0} else weights


def _whole(rendered: Rendered, offsets: Offsets, trained: Trained) -> list[bool]:
    """Return a mask of all tokens from a message on, but for those that touch a message that is left out."""
    begin = 0
    if trained.first:
        begin = min((owner.start for owner in rendered.owners if (owner.message or 0) >= trained.first), default=-1)
        if begin < 0:
            raise ValueError("the completion is nowhere in the rendered conversation")
    mask = [first >= begin for first in offsets.starts]
    for start, end in _texts(rendered, trained.left_out):
        first, last = bisect_right(offsets.ends, start), bisect_left(offsets.starts, end)
        mask[first:last] = [False] * max(0, last - first)
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
