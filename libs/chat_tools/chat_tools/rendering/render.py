"""Messages to token ids with a mask of what the assistant wrote; and longer conversations, token in, token out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from chat_tools.rendering.masks import Region, common_prefix, find_frame, find_region, find_regions
from chat_tools.rendering.media import Expanded, Media, expand, token_types
from chat_tools.rendering.template import ChatTemplate, Cut, Message


@dataclass(frozen=True, slots=True)
class Span:
    """What the assistant wrote as message number `message`: tokens `token_start:token_end`, characters `start:end`."""

    message: int
    token_start: int
    token_end: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as tokens.

    `ids`, `assistant_mask` and `mm_token_type_ids` (0 text, 1 image, 2 video, 3 audio) have one entry a token. The mask
    is true for what the assistant writes, its end-of-turn token included. `problems` says in words what is not as the
    template alone would do, or could not be proven; a message that could not be proven is masked out. `plain` is the
    text before media were expanded, and `anchor` where the last assistant turn begins in it.
    """

    ids: list[int]
    text: str
    assistant_mask: list[bool]
    spans: tuple[Span, ...]
    problems: tuple[str, ...] = ()
    mm_token_type_ids: list[int] = field(default_factory=list)
    messages: tuple[Message, ...] = field(default=(), repr=False)
    template: ChatTemplate | None = field(default=None, repr=False, compare=False)
    prompted: bool = False
    plain: str = field(default="", repr=False)
    anchor: int = 0

    def generated(self, ids: Sequence[int], message: Message | None = None) -> Rendered:
        """Append the tokens that a model sampled after the generation prompt, as they are.

        `message` is how the template shall see the turn (`ParsedMessage.to_message()`); by default its decoded text.
        """
        if self.template is None or not self.prompted:
            raise ValueError("generated tokens follow a generation prompt: render with add_generation_prompt=True")
        text = self.template.tokenizer.decode(list(ids), skip_special_tokens=False)
        message = {"role": "assistant", "content": text} if message is None else message
        start, chars = len(self.ids), len(self.text)
        span = Span(len(self.messages), start, start + len(ids), chars, chars + len(text))
        return replace(
            self,
            ids=[*self.ids, *ids],
            text=self.text + text,
            plain=self.plain + text,
            anchor=len(self.plain),
            assistant_mask=[*self.assistant_mask, *[True] * len(ids)],
            mm_token_type_ids=[*self.mm_token_type_ids, *[0] * len(ids)],
            spans=(*self.spans, span),
            messages=(*self.messages, message),
            prompted=False,
        )


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
    *,
    media: Sequence[Media] = (),
    **options: Any,
) -> Rendered:
    """Render messages to ids, text, a mask of what the assistant wrote, and its spans.

    `tokenizer` is a Hugging Face fast tokenizer (`apply_chat_template`, offsets); `tools` are dicts or typed functions;
    `media` says what the placeholders of images and videos expand to; `options` go to the template
    (`enable_thinking=False`). Any list of messages works: where the template demands a user message, a stand-in is
    rendered after the leading system messages and cut out again.

    The mask follows the template's `{% generation %}` marks where it has them, else it is proven by rendering
    (chat_tools.rendering.masks). `problems` is empty when the ids are those of `apply_chat_template` (before media) and
    the mask is proven. Errors of the template are raised as they are; ValueError for a tokenizer without offsets, or
    media that do not match the messages.
    """
    template = ChatTemplate(tokenizer, tools, options)
    text, cut = template.text_or_cut(messages, add_generation_prompt)
    plain = text if cut is None else cut.text[: cut.start] + cut.text[cut.end :]
    ids, offsets = _encode(tokenizer, plain)
    problems: list[str] = []
    official, marked = _official(template, messages, add_generation_prompt, cut, problems)
    if official != ids:
        problems.append(_difference(official, ids))
    if marked is not None and len(marked) == len(ids):
        regions = _regions_of_runs(marked, offsets, messages, problems)
    else:
        regions, unproven = find_regions(template, messages, plain, add_generation_prompt)
        problems += unproven
    expanded = expand(plain, media)
    if media:
        ids, offsets = _encode(tokenizer, expanded.text)
    spans = [_span(region, expanded, offsets, problems, joined=marked is not None) for region in regions]
    return Rendered(
        ids=ids,
        text=expanded.text,
        assistant_mask=_mask_of(spans, len(ids)),
        spans=tuple(spans),
        problems=tuple(problems),
        mm_token_type_ids=token_types(tokenizer, ids, media) if media else [0] * len(ids),
        messages=tuple(messages),
        template=template,
        prompted=add_generation_prompt,
        plain=plain,
        anchor=regions[-1].start if regions else 0,
    )


def extend(
    rendered: Rendered,
    new_messages: Sequence[Message],
    add_generation_prompt: bool = True,
    *,
    media: Sequence[Media] = (),
) -> Rendered:
    """Append messages (tool results, a user's turn) to a conversation whose tokens stay exactly as they are.

    Only what the template writes after the last assistant turn is tokenised: the end-of-turn token, if the model was
    cut off before it, the separator, the new messages (with their `media`) and the next generation prompt. ValueError
    where the template cannot be continued so.
    """
    template = rendered.template
    if template is None:
        raise ValueError("only what render() or extend() returned can be extended")
    if any(message.get("role") == "assistant" for message in new_messages):
        raise ValueError("extend() takes what others say; an assistant's tokens come in by rendered.generated(ids)")
    messages = [*rendered.messages, *new_messages]
    tail = _tail(rendered, template, messages, add_generation_prompt)
    text = expand(tail, media).text
    ids, _ = _encode(template.tokenizer, text)
    types = token_types(template.tokenizer, ids, media) if media else [0] * len(ids)
    return replace(
        rendered,
        ids=[*rendered.ids, *ids],
        text=rendered.text + text,
        plain=rendered.plain + tail,
        assistant_mask=[*rendered.assistant_mask, *[False] * len(ids)],
        mm_token_type_ids=[*rendered.mm_token_type_ids, *types],
        messages=tuple(messages),
        prompted=add_generation_prompt,
    )


def _tail(rendered: Rendered, template: ChatTemplate, messages: Sequence[Message], prompted: bool) -> str:
    """Return what has to be appended to the rendered text so that the new messages follow."""
    text = template.text(messages, prompted)
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
    frame = find_frame(template, messages[last])
    region = find_region(template, messages, last, text, prompted, frame, 0)
    if isinstance(region, str):
        raise ValueError(f"the conversation cannot be continued token by token: {region}")
    end_token = text[region.body_end : region.end]
    tail = text[region.body_end :]
    turn = rendered.plain[rendered.anchor :]
    done = turn.rfind(end_token) if end_token else -1
    written = ""  # what already stands after the turn's end
    if done >= 0:
        tail = tail[len(end_token) :]
        written = turn[done + len(end_token) :]
    if not tail.startswith(written):
        raise ValueError(f"the template writes {tail[: len(written)]!r} where the conversation already has {written!r}")
    return tail[len(written) :]


def _encode(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    try:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    except NotImplementedError as error:
        raise ValueError("the tokenizer gives no offsets: load the fast one (use_fast=True)") from error
    return list(encoded["input_ids"]), [(int(a), int(b)) for a, b in encoded["offset_mapping"]]


def _official(
    template: ChatTemplate, messages: Sequence[Message], prompted: bool, cut: Cut | None, problems: list[str]
) -> tuple[list[int], list[bool] | None]:
    """Return the ids that `apply_chat_template` itself gives, and its mask if the template has generation marks."""
    marked = template.has_generation_marks
    filled = list(messages) if cut is None else template.stand_in(messages)[0]
    extra: dict[str, Any] = {"return_assistant_tokens_mask": True} if marked else {}
    out = template.apply(filled, prompted, tokenize=True, return_dict=True, **extra)
    ids = list(out["input_ids"])
    mask = [bool(m) for m in out["assistant_masks"]] if marked else None
    if cut is None:
        return ids, mask
    _, offsets = _encode(template.tokenizer, cut.text)
    kept = [i for i, (a, b) in enumerate(offsets) if b <= cut.start or a >= cut.end]
    dropped = [offsets[i] for i in range(len(offsets)) if offsets[i][0] < cut.end and offsets[i][1] > cut.start]
    if dropped and (dropped[0][0] < cut.start or dropped[-1][1] > cut.end):
        problems.append("a token reaches over the border of the stand-in user message")
    return [ids[i] for i in kept], None if mask is None else [mask[i] for i in kept]


def _difference(official: list[int], ids: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(official, ids, strict=False)) if a != b), min(len(official), len(ids)))
    return f"the ids differ from apply_chat_template's at token {at}"


def _span(
    region: Region, expanded: Expanded, offsets: Sequence[tuple[int, int]], problems: list[str], joined: bool
) -> Span:
    """Return the tokens that lie wholly in a region.

    One that reaches over its border is named as a problem and left out; `joined` keeps it, where the template's own
    marks have it so.
    """
    start, end = expanded.move(region.start), expanded.move(region.end)
    inside = [i for i, (a, b) in enumerate(offsets) if a < end and b > start and b > a]
    while inside and offsets[inside[0]][0] < start and not joined:
        problems.append(f"message {region.message}: token {inside[0]} joins the turn's beginning to the prompt")
        inside.pop(0)
    while inside and offsets[inside[-1]][1] > end and not joined:
        problems.append(f"message {region.message}: token {inside[-1]} joins the turn's end to what follows")
        inside.pop()
    first, last = (inside[0], inside[-1] + 1) if inside else (0, 0)
    return Span(region.message, first, last, start, end)


def _mask_of(spans: Sequence[Span], length: int) -> list[bool]:
    mask = [False] * length
    for span in spans:
        mask[span.token_start : span.token_end] = [True] * (span.token_end - span.token_start)
    return mask


def _complete(mask: list[bool], offsets: Sequence[tuple[int, int]]) -> None:
    """Mark all tokens of a character whose first token is marked: transformers' mask ends with the first of them."""
    for i in range(1, len(mask)):
        if mask[i - 1] and offsets[i] == offsets[i - 1] and offsets[i][0] < offsets[i][1]:
            mask[i] = True


def _regions_of_runs(
    mask: list[bool], offsets: Sequence[tuple[int, int]], messages: Sequence[Message], problems: list[str]
) -> list[Region]:
    """Match the runs of the template's own mask with the assistant messages, in order."""
    _complete(mask, offsets)
    runs = [[i for i, _ in run] for on, run in groupby(enumerate(mask), key=lambda pair: pair[1]) if on]
    assistants = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
    if len(runs) != len(assistants):
        problems.append(f"the template marks {len(runs)} spans for {len(assistants)} assistant messages")
    return [
        Region(index, offsets[run[0]][0], offsets[run[-1]][1], offsets[run[-1]][1])
        for index, run in zip([*assistants, *[len(messages)] * len(runs)], runs, strict=False)
    ]
