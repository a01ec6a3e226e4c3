"""What of a rendered conversation is trained, and how much: messages chosen, weighted, and ends that are missing."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal

from chat_tools.rendering.render import AssistantSpan, OwnedText, Rendered
from chat_tools.rendering.template import tokens_as_text


def loss_weights(
    rendered: Rendered,
    train: Literal["all", "last"] | Collection[int] = "all",
    weights: Mapping[int, float] | None = None,
) -> list[float]:
    """Return a weight for each token: 0 for what is not trained, else that of its message (1 without one).

    `train` chooses the assistant's turns: all, the last one, or those of these messages' numbers; `weights` are by
    message's number. ValueError for a message that is no assistant's, or that could not be proven and so has no token:
    a weight that has no effect is no choice.
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
    if bad := [number for number, weight in given.items() if not 0 <= weight < float("inf")]:
        raise ValueError(f"the weight of message {bad[0]} is {given[bad[0]]}: weights are 0 or more")
    column = [0.0] * len(rendered.ids)
    for span in spans:
        if span.message in chosen:
            weight = float(given.get(span.message, 1.0))
            column[span.token_start : span.token_end] = [weight] * (span.token_end - span.token_start)
    return column


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
