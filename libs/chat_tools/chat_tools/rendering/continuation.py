"""Longer conversations, token in, token out: what was sampled or rendered once stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from chat_tools.rendering.frames import find_frame
from chat_tools.rendering.masks import Regions, find_regions
from chat_tools.rendering.media import Media, expand, token_types
from chat_tools.rendering.owners import common_prefix
from chat_tools.rendering.render import Rendered, encode, owned_text
from chat_tools.rendering.template import ChatTemplate, Message


def extend(
    rendered: Rendered,
    new_messages: Sequence[Message],
    add_generation_prompt: bool = True,
    *,
    media: Sequence[Media] = (),
) -> Rendered:
    """Append messages (tool results, a user's turn) to a conversation whose tokens stay exactly as they are.

    Only what the template writes after the last assistant turn is tokenised: the end-of-turn token, if the model was
    cut off before it, the separator, the new messages (with their `media`) and the next generation prompt. A sampled
    stop token takes the place of the one that the template writes there (gpt-oss samples `<|return|>` where history has
    `<|end|>`; GLM-4.5 samples the `<|observation|>` with which the result begins). ValueError where the template cannot
    be continued so.
    """
    template = rendered.template
    if template is None:
        raise ValueError("only what render() or extend() returned can be extended")
    if any(message.get("role") == "assistant" for message in new_messages):
        raise ValueError("extend() takes what others say; an assistant's tokens come in by rendered.generated(ids)")
    messages = [*rendered.messages, *new_messages]
    whole = template.text(messages, add_generation_prompt)
    found = find_regions(template, messages, whole, add_generation_prompt)
    tail = _tail(rendered, template, messages, whole, found)
    expanded = expand(tail, media)
    ids, _ = encode(template.tokenizer, expanded.text)
    types = token_types(template.tokenizer, ids, media) if media else [0] * len(ids)
    shift = len(rendered.text)
    owners = owned_text((), found.owners.pieces, messages, expanded, skip=len(whole) - len(tail))
    return replace(
        rendered,
        ids=[*rendered.ids, *ids],
        text=rendered.text + expanded.text,
        plain=rendered.plain + tail,
        assistant_mask=[*rendered.assistant_mask, *[False] * len(ids)],
        mm_token_type_ids=[*rendered.mm_token_type_ids, *types],
        owners=(*rendered.owners, *(o._replace(start=o.start + shift, end=o.end + shift) for o in owners)),
        messages=tuple(messages),
        prompted=add_generation_prompt,
    )


def _tail(rendered: Rendered, template: ChatTemplate, messages: Sequence[Message], text: str, found: Regions) -> str:
    """Return what has to be appended to the rendered text so that the new messages follow."""
    assistants = [i for i, m in enumerate(rendered.messages) if m.get("role") == "assistant"]
    if not assistants:
        if not text.startswith(rendered.plain):
            at = common_prefix(text, rendered.plain)
            raise ValueError(
                "the template writes the beginning differently once messages follow, from "
                f"{rendered.plain[at : at + 40]!r}; render the whole conversation anew"
            )
        return text[len(rendered.plain) :]
    last = assistants[-1]
    mine = [region for region in found.regions if region.message == last]
    if not mine:
        reason = next((p for p in found.problems if p.startswith(f"message {last}:")), "its turn is not written")
        raise ValueError(f"the conversation cannot be continued token by token: {reason}")
    region = max(mine, key=lambda region: region.end)
    tail = text[region.body_end :]
    token = text[region.body_end : region.end]
    if rendered.stop and tail.startswith(rendered.stop):
        tail = tail[len(rendered.stop) :]
    elif rendered.stop and token in find_frame(template, messages[last]).closings:
        tail = tail[len(token) :]
    written = rendered.plain[rendered.turn_end :]  # what already stands after the turn's end
    if not tail.startswith(written):
        raise ValueError(f"the template writes {tail[: len(written)]!r} where the conversation already has {written!r}")
    return tail[len(written) :]
