"""Messages to token ids with a mask of what the assistant wrote."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, NamedTuple

from chat_tools.rendering.frames import find_frame
from chat_tools.rendering.masks import Region, Regions, find_regions
from chat_tools.rendering.media import Expanded, Media, expand, token_types
from chat_tools.rendering.owners import Piece
from chat_tools.rendering.template import ChatTemplate, Cut, Message, tokens_as_text


@dataclass(frozen=True, slots=True)
class Span:
    """What the assistant wrote as message number `message`: tokens `token_start:token_end`, characters `start:end`."""

    message: int
    token_start: int
    token_end: int
    start: int
    end: int


class OwnedText(NamedTuple):
    """Characters `start:end`, and whose they are: a role and its message's number, or "template" and None."""

    start: int
    end: int
    owner: str
    message: int | None


@dataclass(frozen=True, slots=True)
class Rendered:
    """Hold a conversation as tokens.

    `ids`, `assistant_mask` and `mm_token_type_ids` (0 text, 1 image, 2 video, 3 audio) have one entry a token. The mask
    is true for what the assistant writes, its end-of-turn token included. `owners` cover the text: each character is
    the system's, a user's, a tool's, an assistant turn's (with what the template makes the model write around its
    words) or the template's. A token that straddles two owners is not trained; `straddling` lists those at the border
    of a turn, which is no problem. `problems` says in words what is not as the template alone would do, or could not be
    proven; a turn that could not be proven is not trained. A row with a problem should be left out of training, and
    counted. `plain` is the text before media were expanded, `turn_end` where the last assistant turn ends in it and
    `stop` the token that ended it ("" if it was cut off).
    """

    ids: list[int]
    text: str
    assistant_mask: list[bool]
    spans: tuple[Span, ...]
    problems: tuple[str, ...] = ()
    mm_token_type_ids: list[int] = field(default_factory=list)
    owners: tuple[OwnedText, ...] = field(default=(), repr=False)
    straddling: tuple[int, ...] = ()
    messages: tuple[Message, ...] = field(default=(), repr=False)
    template: ChatTemplate | None = field(default=None, repr=False, compare=False)
    prompted: bool = False
    plain: str = field(default="", repr=False)
    turn_end: int = 0
    stop: str = ""

    def generated(self, ids: Sequence[int], message: Message | None = None) -> Rendered:
        """Append the tokens that a model sampled after the generation prompt, as they are.

        `message` is how the template shall see the turn (`ParsedMessage.to_message()`); by default its decoded text
        without the token that stopped it. ValueError if there is no generation prompt to go on from.
        """
        if self.template is None or not self.prompted:
            raise ValueError("generated tokens follow a generation prompt: render with add_generation_prompt=True")
        decode = self.template.tokenizer.decode
        text, last = (decode(list(part), skip_special_tokens=False) for part in (ids, ids[-1:]))
        asked = self.messages[-1] if self.messages else {}
        stop = last if last in find_frame(self.template, asked if message is None else message).stops else ""
        message = {"role": "assistant", "content": text.removesuffix(stop)} if message is None else message
        start, chars, number = len(self.ids), len(self.text), len(self.messages)
        return replace(
            self,
            ids=[*self.ids, *ids],
            text=self.text + text,
            plain=self.plain + text,
            assistant_mask=[*self.assistant_mask, *[True] * len(ids)],
            mm_token_type_ids=[*self.mm_token_type_ids, *[0] * len(ids)],
            spans=(*self.spans, Span(number, start, start + len(ids), chars, chars + len(text))),
            owners=(*self.owners, OwnedText(chars, chars + len(text), "assistant", number)),
            messages=(*self.messages, message),
            prompted=False,
            turn_end=len(self.plain) + len(text),
            stop=stop,
        )


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = False,
    *,
    media: Sequence[Media] = (),
    stop_tokens: Iterable[str | int] | None = None,
    **options: Any,
) -> Rendered:
    """Render messages to ids, text, a mask of what the assistant wrote, and its spans.

    `tokenizer` is a Hugging Face fast tokenizer (`apply_chat_template`, offsets); `tools` are dicts or typed functions;
    `media` says what the placeholders of images and videos expand to; `options` go to the template
    (`enable_thinking=False`). `stop_tokens` are the texts or ids of the tokens that stop the model
    (`read_stop_tokens(folder, tokenizer)` reads generation_config.json); without them, what the tokenizer and the
    template tell. Any list of messages works: where the template demands a user message, a stand-in is rendered after
    the leading system messages and cut out again.

    The mask is what the assistant's turns hold, proven by rendering (chat_tools.rendering.masks): a token is trained
    only if none of its characters is anybody else's, the template's included. `{% generation %}` marks of the template
    can leave out some of it, and add nothing.
    `problems` is empty when the ids are those of `apply_chat_template` (before media) and the mask is proven. Errors of
    the template are raised as they are; ValueError for a tokenizer without offsets, stop tokens that it does not have,
    or media that do not match the messages.
    """
    stops = None if stop_tokens is None else tokens_as_text(stop_tokens, tokenizer)
    template = ChatTemplate(tokenizer, tools, options, stops)
    text, cut = template.text_or_cut(messages, add_generation_prompt)
    plain = text if cut is None else cut.text[: cut.start] + cut.text[cut.end :]
    ids, offsets = encode(tokenizer, plain)
    problems: list[str] = []
    official, marked = _official(template, messages, add_generation_prompt, cut, problems)
    if official != ids:
        problems.append(_difference(official, ids))
    found = find_regions(template, messages, plain, add_generation_prompt)
    if marked is not None and len(marked) == len(ids):
        regions = _regions_of_marks(marked, offsets, found, messages, problems)
    else:
        regions = found.regions
        problems += found.problems
    expanded = expand(plain, media)
    if media:
        ids, offsets = encode(tokenizer, expanded.text)
    straddling: list[int] = []
    spans = [_span(region, expanded, offsets, straddling) for region in regions]
    for region in found.regions if marked is not None else ():
        _span(region, expanded, offsets, straddling)
    ends = [*(found.regions or regions), Region(0, 0, 0, 0)]
    last = max(ends, key=lambda region: (region.message, region.end))
    return Rendered(
        ids=ids,
        text=expanded.text,
        assistant_mask=_mask_of(spans, len(ids)),
        spans=tuple(spans),
        problems=tuple(problems),
        mm_token_type_ids=token_types(tokenizer, ids, media) if media else [0] * len(ids),
        owners=owned_text(regions, found.owners.pieces, messages, expanded),
        straddling=tuple(sorted(set(straddling))),
        messages=tuple(messages),
        template=template,
        prompted=add_generation_prompt,
        plain=plain,
        turn_end=last.end,
        stop=plain[last.body_end : last.end],
    )


def encode(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Return ids and the characters of each token; ValueError for a tokenizer without offsets."""
    try:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    except NotImplementedError as error:
        raise ValueError("the tokenizer gives no offsets: load the fast one (use_fast=True)") from error
    return list(encoded["input_ids"]), [tuple(offset) for offset in encoded["offset_mapping"]]


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
    _, offsets = encode(template.tokenizer, cut.text)
    kept = [i for i, (a, b) in enumerate(offsets) if b <= cut.start or a >= cut.end]
    dropped = [offsets[i] for i in range(len(offsets)) if offsets[i][0] < cut.end and offsets[i][1] > cut.start]
    if dropped and (dropped[0][0] < cut.start or dropped[-1][1] > cut.end):
        problems.append("a token reaches over the border of the stand-in user message")
    return [ids[i] for i in kept], None if mask is None else [mask[i] for i in kept]


def _difference(official: list[int], ids: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(official, ids, strict=False)) if a != b), min(len(official), len(ids)))
    return f"the ids differ from apply_chat_template's at token {at}"


def _span(region: Region, expanded: Expanded, offsets: Sequence[tuple[int, int]], straddling: list[int]) -> Span:
    """Return the tokens that lie wholly in a region; those that reach over its border are listed and left out."""
    start, end = expanded.move(region.start), expanded.move(region.end)
    first = bisect_right(offsets, start, key=lambda offset: offset[1])
    last = bisect_left(offsets, end, key=lambda offset: offset[0])
    while first < last and offsets[first][0] < start:
        straddling.append(first)
        first += 1
    while first < last and offsets[last - 1][1] > end:
        straddling.append(last - 1)
        last -= 1
    first, last = (first, last) if first < last else (0, 0)
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


def _regions_of_marks(
    mask: list[bool],
    offsets: Sequence[tuple[int, int]],
    found: Regions,
    messages: Sequence[Message],
    problems: list[str],
) -> list[Region]:
    """Take of the template's own mask what the assistant's turns hold: marks can leave out, and add nothing.

    Of marked tokens that touch a proven turn those inside it are trained; others belong to the turns that could not be
    proven, in order, unless somebody else owns a character of theirs. Where the model's stop tokens were given, the one
    that ends a turn is trained even if the marks end right before it.
    """
    _complete(mask, offsets)
    problems += found.left_out
    assistants = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
    proven = {region.message for region in found.regions}
    unproven = [i for i in assistants if i not in proven]
    foreign = [p for p in found.owners.pieces if messages[p.message].get("role") != "assistant"]
    regions: list[Region] = []
    for on, run in groupby(range(len(mask)), key=mask.__getitem__):
        tokens = [offsets[i] for i in run if offsets[i][0] < offsets[i][1]] if on else []
        if not tokens:
            continue
        taken = [p.message for p in _overlapping(foreign, tokens[0][0], tokens[-1][1])]
        problems += [f"message {m}: the template marks what the {messages[m].get('role')} wrote" for m in taken]
        inside = _inside(tokens, found.regions)
        if not inside and unproven:
            own = [token for token in tokens if not _overlapping(foreign, *token)]
            inside = [Region(unproven.pop(0), own[0][0], own[-1][1], own[-1][1])] if own else []
        regions += inside
    if found.stops_known:
        ends = {region.body_end: region.end for region in found.regions}
        regions = [r._replace(end=max(r.end, ends.get(r.end, r.end))) for r in regions]
    omitted = set(found.owners.without_calls)
    unmarked = [i for i in assistants if i not in omitted | {region.message for region in regions}]
    problems += [f"message {i}: the template marks nothing of it" for i in unmarked]
    return [region for region in regions if region.message not in omitted]


def _inside(tokens: Sequence[tuple[int, int]], regions: Sequence[Region]) -> list[Region]:
    """Return the parts of regions that a run of tokens touches."""
    parts: list[Region] = []
    at = bisect_right(regions, tokens[0][0], key=lambda region: region.end)
    while at < len(regions) and regions[at].start < tokens[-1][1]:
        region = regions[at]
        own = [(a, b) for a, b in tokens if a < region.end and b > region.start]
        start, end = max(own[0][0], region.start), min(own[-1][1], region.end)
        parts.append(Region(region.message, start, end, end))
        at += 1
    return parts


def _overlapping(pieces: Sequence[Piece], start: int, end: int) -> list[Piece]:
    """Return the pieces, which are in order and do not overlap, that hold a character of `start:end`."""
    at = bisect_right(pieces, start, key=lambda piece: piece.end)
    found = []
    while at < len(pieces) and pieces[at].start < end:
        found.append(pieces[at])
        at += 1
    return found


def owned_text(
    regions: Sequence[Region], pieces: Sequence[Piece], messages: Sequence[Message], expanded: Expanded, skip: int = 0
) -> tuple[OwnedText, ...]:
    """Say whose each character is from `skip` on: turns first, then what other messages hold; the rest the template's.

    `expanded` is the text after the characters that are skipped; the positions returned are in it.
    """
    claims = [(r.start - skip, r.end - skip, r.message) for r in regions if r.message < len(messages)]
    starts = sorted(claims)
    for piece in pieces:
        at = bisect_right(starts, piece.start - skip, key=lambda claim: claim[0]) - 1
        if at < 0 or piece.start - skip >= starts[at][1]:
            claims.append((piece.start - skip, piece.end - skip, piece.message))
    found: list[OwnedText] = []
    at = 0
    for start, end, message in sorted(claims):
        start, end = max(expanded.move(max(start, 0)), at), expanded.move(max(end, 0))
        if end <= start:
            continue
        if start > at:
            found.append(OwnedText(at, start, "template", None))
        found.append(OwnedText(start, end, str(messages[message].get("role")), message))
        at = end
    if at < len(expanded.text):
        found.append(OwnedText(at, len(expanded.text), "template", None))
    return tuple(found)
