"""What of a rendered conversation is trained, and how much: messages chosen, weighted, and ends that are missing."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from chat_tools.known_formats.grammar import Format
from chat_tools.parsing.parser import parse
from chat_tools.rendering.format_detection import detect_format
from chat_tools.rendering.render import AssistantSpan, OwnedText, Rendered
from chat_tools.rendering.replaced_messages import REASONING_KEYS
from chat_tools.rendering.template import tokens_as_text
from chat_tools.rendering.token_places import encode

Train = Literal["all", "last"] | Collection[int]
Weights = Mapping[int, float | Sequence[float]]


def loss_weights(
    rendered: Rendered,
    train: Train = "all",
    weights: Weights | None = None,
    reasoning: float = 1.0,
    format: str | Format | None = None,  # noqa: A002 - the name that `parse` gives it
) -> list[float]:
    """Return a weight for each token: 0 for what is not trained, else that of its message (1 without one).

    `train` chooses the assistant's turns: all, the last one, or those of these messages' numbers; `weights` are by
    message's number, one for all of its trained tokens or one for each. The weight of a token that
    `reasoning_mask(rendered, format)` names is multiplied by `reasoning`: 0 leaves reasoning out. ValueError for a
    message that is no assistant's, or that could not be proven and so has no token: a weight that has no effect is no
    choice.
    """
    spans = list(rendered.spans)
    known = {span.message for span in spans}
    if train == "last":
        turns = [number for number, message in enumerate(rendered.messages) if message.get("role") == "assistant"]
        chosen = frozenset(turns[-1:])
    else:
        chosen = frozenset(known if train == "all" else map(_number, train))
    given = dict(weights or {})
    if wrong := sorted({*chosen, *given} - known):
        raise ValueError(
            f"message {wrong[0]} cannot be trained: it is no assistant's, or is not proven "
            f"({'; '.join(rendered.problems) or 'no problem is known'})"
        )
    column = [0.0] * len(rendered.ids)
    for number in chosen:
        own = [at for span in spans if span.message == number for at in range(span.token_start, span.token_end)]
        for at, weight in zip(own, _weights(number, given.get(number, 1.0), len(own)), strict=True):
            column[at] = weight
    for number in given.keys() - chosen:
        raise ValueError(f"message {number} has a weight and is not among those that `train` chooses")
    if reasoning == 1.0:
        return column
    factor = _weights("reasoning", reasoning, 1)[0]
    return [w * factor if r else w for w, r in zip(column, reasoning_mask(rendered, format), strict=True)]


def _weights(of: int | str, given: float | Sequence[float], count: int) -> list[float]:
    weights = [float(given)] * count if isinstance(given, int | float) else [float(weight) for weight in given]
    if len(weights) != count:
        raise ValueError(f"message {of} has {len(weights)} weights for {count} trained tokens")
    if bad := [weight for weight in weights if not 0 <= weight < math.inf]:
        what = "reasoning" if of == "reasoning" else f"message {of}"
        raise ValueError(f"the weight of {what} is {bad[0]}: weights are numbers of at least 0")
    return weights


def reasoning_mask(rendered: Rendered, format: str | Format | None = None) -> list[bool]:  # noqa: A002
    """Return the tokens of the assistants' reasoning, with the markers around it.

    `format`: how the model writes it; by default that of the template's calls, or `<think>` blocks where it has none.
    ValueError where the template writes a message's reasoning in another way, so that it could not be told from what is
    said, and for sampled tokens that the tokenizer would not give their text.
    """
    if rendered.template is None:
        raise ValueError("only what render() or extend() returned tells reasoning")
    tokenizer = rendered.template.tokenizer
    ids, offsets = encode(tokenizer, rendered.text)
    if ids != rendered.ids:
        raise ValueError("the text has other tokens than those that were sampled: weigh its messages by token")
    if format is None:
        format = reasoning_format(tokenizer)  # noqa: A001
    mask = [False] * len(ids)
    header = {owner.end: owner.start for owner in rendered.owners if owner.message is None}
    for span in rendered.spans:
        text = rendered.text[span.start : span.end]
        prompt = rendered.text[header.get(span.start, span.start) : span.start]
        turn = parse(text, format, prefill=prompt)
        wanted = [str(rendered.messages[span.message].get(key) or "").strip() for key in REASONING_KEYS]
        parts = [(span.start + s.start, span.start + s.end) for s in turn.segments if s.kind == "reasoning"]
        if any(words and words in text and words not in turn.reasoning for words in wanted):
            raise ValueError(f"message {span.message}: its reasoning is written otherwise than {format} writes it")
        for at in range(span.token_start, span.token_end):
            mask[at] = any(offsets.starts[at] < end and offsets.ends[at] > start for start, end in parts)
    return mask


def reasoning_format(tokenizer: object) -> str:
    """Return the format that tells reasoning: that of the template's calls, or, where it has none, one with <think>."""
    try:
        return detect_format(tokenizer)
    except ValueError:
        return "hermes"


def _number(message: int | str) -> int:
    if not isinstance(message, int):
        raise ValueError(f'train is "all", "last" or messages\' numbers, not {message!r}')
    return message


def with_end(rendered: Rendered, stop: str | int) -> Rendered:
    """Return the conversation with the token that ends its last turn, trained, where the template writes none.

    GLM-4.5's template ends a turn by the next message alone. A conversation whose last turn has an end, or does not
    stand at the end of the text, comes back as it is. ValueError for a stop that is not one token.
    """
    template = rendered.template
    if template is None:
        raise ValueError("only what render() or extend() returned can be ended")
    (text,) = tokens_as_text([stop], template.tokenizer)
    last = len(rendered.messages) - 1
    own = [span for span in rendered.spans if span.message == last]
    if last not in rendered.unfinished or not own or rendered.plain[rendered.turn_end :].strip():
        return rendered
    (token,) = template.tokenizer(text, add_special_tokens=False)["input_ids"]
    size, chars = len(rendered.ids), len(rendered.text)
    return replace(
        rendered,
        ids=[*rendered.ids, token],
        text=rendered.text + text,
        plain=rendered.plain + text,
        assistant_mask=[*rendered.assistant_mask, True],
        mm_token_type_ids=[*rendered.mm_token_type_ids, 0],
        spans=(*rendered.spans, AssistantSpan(last, size, size + 1, chars, chars + len(text))),
        owners=(*rendered.owners, OwnedText(chars, chars + len(text), "assistant", last)),
        unfinished=tuple(number for number in rendered.unfinished if number != last),
        turn_end=len(rendered.plain) + len(text),
        stop=text,
    )
