"""Longer conversations, token in, token out: what was sampled or rendered once stays as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from chat_tools.rendering.masks import Regions, find_regions
from chat_tools.rendering.media import Media, expand, token_types
from chat_tools.rendering.message_attribution import has_text
from chat_tools.rendering.render import Rendered, owned_text, render
from chat_tools.rendering.replaced_messages import MessageSpan, common_prefix
from chat_tools.rendering.template import ChatTemplate, Message, content_like, tokens_as_text
from chat_tools.rendering.token_places import encode
from chat_tools.rendering.turn_delimiters import added_tokens, find_turn_delimiters, token_start


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
    `<|end|>`; GLM-4.5 samples the `<|observation|>` with which the result begins). Where the template writes results
    before the words that stand beside their call (Gemma 4), they follow the call as if it had been made without words.
    ValueError where the template cannot be continued so.
    """
    template = rendered.template
    if template is None:
        raise ValueError("only what render() or extend() returned can be extended")
    if any(message.get("role") == "assistant" for message in new_messages):
        raise ValueError("extend() takes what others say; an assistant's tokens come in by rendered.generated(ids)")
    messages = [*rendered.messages, *new_messages]
    tail, owned = _following(rendered, template, messages, add_generation_prompt)
    expanded = expand(tail, media)
    ids, _ = encode(template.tokenizer, expanded.text)
    types = token_types(template.tokenizer, ids, media) if media else [0] * len(ids)
    shift = len(rendered.text)
    owners = owned_text((), owned, messages, expanded)
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


def _following(
    rendered: Rendered, template: ChatTemplate, messages: Sequence[Message], prompted: bool
) -> tuple[str, list[MessageSpan]]:
    """Return the text to append for the new messages, and the owners of its characters."""
    known = len(rendered.messages)
    for seen in (messages, _without_last_words(messages, known)):
        text = template.text(seen, prompted)
        turns = find_regions(template, seen, text, prompted)
        tail = _tail(rendered, template, text, turns)
        at = len(text) - len(tail)
        new = [piece for piece in turns.owners.pieces if piece.message >= known]
        written = {*turns.owners.unknown, *(piece.message for piece in new if piece.start >= at)}
        lost = [i for i in range(known, len(messages)) if i not in written and has_text(messages[i])]
        if not lost and all(piece.start >= at for piece in new):
            return tail, [piece._replace(start=piece.start - at, end=piece.end - at) for piece in new]
    raise ValueError(
        f"the template leaves out message {lost[0]}, or writes it before the end of the turn that it follows"
        if lost
        else "the template writes some of the new messages before the end of the turn that they follow"
    )


def _without_last_words(messages: Sequence[Message], known: int) -> list[Message]:
    """Return the messages; the last assistant's among the first `known` keeps its calls alone."""
    changed = list(messages)
    for index in reversed(range(known)):
        message = messages[index]
        if message.get("role") == "assistant":
            changed[index] = {**message, "content": content_like(message, "")}
            break
    return changed


def text_after_turn(
    tokenizer: Any,
    new_messages: Sequence[Message],
    stop: str | int = "",
    tools: Sequence[Any] | None = None,
    *,
    stop_tokens: Iterable[str | int] | None = None,
    **options: Any,
) -> str:
    """Return the text to tokenise after a sampled turn that the token `stop` ended ("" where it was cut off).

    It is what `extend` appends, the next generation prompt included, found with a short conversation in the place of
    the real one: its time does not grow with the conversation, which need not be kept as messages. The calls that are
    answered have the names and ids of the tool messages (`name`, `tool_call_id`); `tools`, `stop_tokens` and `options`
    are those of `render`. ValueError where the template cannot be continued so. A template that writes new messages in
    another way after other turns needs `extend`.
    """
    like = new_messages[0] if new_messages else {}
    results = [message for message in new_messages if message.get("role") == "tool"]
    question = [{"role": "user", "content": content_like(like, "x")}]
    prompted = render(tokenizer, question, tools, True, stop_tokens=stop_tokens, **options)
    ids = tokenizer.convert_tokens_to_ids(list(tokens_as_text([stop], tokenizer))) if stop != "" else []

    def following(arguments: Any) -> str:
        answer: dict[str, Any] = {"role": "assistant", "content": content_like(like, "" if results else "y")}
        if results:
            answer["tool_calls"] = [_call_of(message, number, arguments) for number, message in enumerate(results)]
        turn = prompted.generated(ids, answer)
        return extend(turn, new_messages).text[len(turn.text) :]

    try:
        return following({})
    except TypeError:  # DeepSeek-V3's template takes arguments as JSON text alone
        if not results:
            raise
        return following("{}")


def _call_of(result: Message, number: int, arguments: Any) -> dict[str, Any]:
    """Return a call that a tool message may answer."""
    function = {"name": result.get("name", "f"), "arguments": arguments}
    return {"type": "function", "id": result.get("tool_call_id", f"call{number:05}"), "function": function}


def _tail(rendered: Rendered, template: ChatTemplate, text: str, turns: Regions) -> str:
    """Return the text to append to the rendered text for the new messages."""
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
    mine = [region for region in turns.regions if region.message == last]
    if not mine:
        reason = next((p for p in turns.problems if p.startswith(f"message {last}:")), "its turn is not written")
        raise ValueError(f"the conversation cannot be continued token by token: {reason}")
    region = max(mine, key=lambda region: region.end)
    end = text[region.body_end : region.end]
    after = region.body_end
    if not rendered.stop:  # cut off, perhaps within its end
        after += _overlap(rendered.plain[: rendered.turn_end], end, added_tokens(template.tokenizer))
    elif end.endswith(rendered.stop) or end in find_turn_delimiters(template, rendered.messages[last]).ends:
        after = region.end
    elif text.startswith(rendered.stop, after):
        after += len(rendered.stop)
    tail = text[after:]
    written = rendered.plain[rendered.turn_end :]  # what already stands after the turn's end
    if not tail.startswith(written):
        raise ValueError(f"the template writes {tail[: len(written)]!r} where the conversation already has {written!r}")
    return tail[len(written) :]


def _overlap(said: str, end: str, tokens: frozenset[str]) -> int:
    """Return how much of a turn's end stands at the end of what was said already, in whole tokens."""
    lengths = (n for n in range(min(len(end), len(said)), 0, -1) if said.endswith(end[:n]))
    return next((n for n in lengths if token_start(end, n, tokens) == n), 0)
