"""Messages to token ids with a mask of the assistant's tokens."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from chat_tools.rendering.generation_regions import block_mask, marks_are, trained_regions
from chat_tools.rendering.masks import Region, Regions, find_regions
from chat_tools.rendering.media import Expanded, Media, expand, token_types
from chat_tools.rendering.message_attribution import MessageAttribution, render_marked
from chat_tools.rendering.plans import Shape, plan_of, regions_of, save_plan, shape_of
from chat_tools.rendering.replaced_messages import MessageSpan
from chat_tools.rendering.template import ChatTemplate, Cut, Message, tokens_as_text
from chat_tools.rendering.token_places import NO_OFFSETS, Offsets, encode
from chat_tools.rendering.turn_delimiters import TurnDelimiters, delimiters_and_tokens, find_turn_delimiters, last_token

_MOST_TEMPLATES = 64  # of a renderer: rows with tools of their own would fill the memory


@dataclass(frozen=True, slots=True)
class AssistantSpan:
    """The assistant's text of message number `message`: tokens `token_start:token_end`, characters `start:end`."""

    message: int
    token_start: int
    token_end: int
    start: int
    end: int


class OwnedText(NamedTuple):
    """Characters `start:end` and their owner: a role and its message's number, or "template" and None."""

    start: int
    end: int
    owner: str
    message: int | None


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as tokens.

    `ids`, `assistant_mask` and `mm_token_type_ids` (0 text, 1 image, 2 video, 3 audio) have one entry a token. The mask
    is true for what the assistant writes, its end-of-turn token included. `owners` cover the text: each character is
    the system's, a user's, a tool's, an assistant turn's (with what the template makes the model write around its
    words) or the template's. A token that straddles two owners is not trained; `straddling` lists those at the border
    of a turn, which is no problem. `problems` says in words what is not as the template alone would do, or could not be
    proven; a turn that could not be proven is not trained. A row with a problem should be left out of training, and
    counted. `unfinished` are the assistant turns of which no token is trained that ends them: the template writes none.
    `plain` is the text before media were expanded, `turn_end` where the last assistant turn ends in it and `stop` the
    token that ended it ("" if it was cut off).
    """

    ids: list[int]
    text: str
    assistant_mask: list[bool]
    spans: tuple[AssistantSpan, ...]
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
    unfinished: tuple[int, ...] = ()

    def generated(self, ids: Sequence[int], message: Message | None = None) -> Rendered:
        """Append the tokens that a model sampled after the generation prompt, unchanged.

        `message` is the turn for the template (`ParsedMessage.to_message()`); by default its decoded text without the
        end of a turn that stopped it. ValueError if there is no generation prompt before it.
        """
        if self.template is None or not self.prompted:
            raise ValueError("generated tokens follow a generation prompt: render with add_generation_prompt=True")
        decode = self.template.tokenizer.decode
        text, last = (decode(list(part), skip_special_tokens=False) for part in (ids, ids[-1:]))
        like = self.messages[-1] if self.messages else {}
        delimiters = find_turn_delimiters(self.template, like if message is None else message)
        stop = last if last in delimiters.stops else ""
        end = delimiters.end_of(text) if stop else ""
        message = {"role": "assistant", "content": text.removesuffix(end)} if message is None else message
        start, chars, number = len(self.ids), len(self.text), len(self.messages)
        return replace(
            self,
            ids=[*self.ids, *ids],
            text=self.text + text,
            plain=self.plain + text,
            assistant_mask=[*self.assistant_mask, *[True] * len(ids)],
            mm_token_type_ids=[*self.mm_token_type_ids, *[0] * len(ids)],
            spans=(*self.spans, AssistantSpan(number, start, start + len(ids), chars, chars + len(text))),
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
    """Render messages to ids, text, a mask of the assistant's tokens, and their spans.

    `tokenizer` is a Hugging Face fast tokenizer (`apply_chat_template`, offsets); `tools` are dicts or typed functions;
    `media` holds the expansions of the placeholders of images and videos; `options` go to the template
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
    return Renderer(tokenizer, stop_tokens, **options)(messages, tools, add_generation_prompt, media=media)


class Renderer:
    """`render` for many conversations, by a tokenizer that stays as it is meanwhile: what they share is kept."""

    def __init__(self, tokenizer: Any, stop_tokens: Iterable[str | int] | None = None, **options: Any) -> None:
        self.tokenizer = tokenizer
        self._stops = None if stop_tokens is None else tokens_as_text(stop_tokens, tokenizer)
        self._options = options
        self._templates: dict[str, ChatTemplate] = {}

    def __call__(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        add_generation_prompt: bool = False,
        *,
        media: Sequence[Media] = (),
    ) -> Rendered:
        """Render messages as `render` does."""
        if not all(type(tool) is dict for tool in tools or ()):  # a function tells less of itself
            return _render(self._template(tools), messages, add_generation_prompt, media)
        known = repr(tools) if tools else ""
        template = self._templates.get(known)
        if template is None:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            template = self._templates[known] = self._template(tools)
        return _render(template, messages, add_generation_prompt, media)

    def _template(self, tools: Sequence[Any] | None) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, tools, self._options, self._stops)


def _render(
    template: ChatTemplate, given: Sequence[Message], add_generation_prompt: bool, media: Sequence[Media]
) -> Rendered:
    tokenizer, messages = template.tokenizer, template.plain(given)
    problems: list[str] = []
    base = _twice(template, messages, add_generation_prompt) or _apart(
        template, messages, add_generation_prompt, problems
    )
    plain, ids, offsets = base.text, base.ids, base.offsets
    turns = base.turns or find_regions(template, messages, plain, add_generation_prompt, base.owners)
    if base.shape is not None and base.turns is None:
        save_plan(template, messages, base.shape, add_generation_prompt, plain, turns)
    regions = trained_regions(turns, base.marked, offsets, messages, problems)
    expanded = expand(plain, media)
    if media:
        ids, offsets = encode(tokenizer, expanded.text)
    spans, straddling = _spans(regions, turns.regions, expanded, offsets)
    last = max([*(turns.regions or regions), Region(0, 0, 0, 0)], key=lambda region: (region.message, region.end))
    end = plain[last.body_end : last.end]
    known = delimiters_and_tokens(template, messages[last.message]) if regions or end else None
    return Rendered(
        ids=ids,
        text=expanded.text,
        assistant_mask=_mask_of(spans, len(ids)),
        spans=spans,
        problems=tuple(problems),
        mm_token_type_ids=token_types(tokenizer, ids, media) if media else [0] * len(ids),
        owners=owned_text(regions, turns.owners.pieces, messages, expanded),
        straddling=straddling,
        messages=tuple(given),
        template=template,
        prompted=add_generation_prompt,
        plain=plain,
        turn_end=last.end,
        unfinished=_unfinished(regions, plain, known and known[0]),
        stop=last_token(end, known[2]) if end and known else "",
    )


class _Base(NamedTuple):
    """A rendered text, its tokens and the characters of each, the template's own mask; its owners, shape, if known.

    `turns` are the regions where they were foreseen.
    """

    text: str
    ids: list[int]
    offsets: Offsets
    marked: list[int] | None
    owners: MessageAttribution | None
    shape: Shape | None = None
    turns: Regions | None = None


def _twice(template: ChatTemplate, messages: Sequence[Message], prompted: bool) -> _Base | None:
    """Render twice: with marks, which gives the text and its owners, and as `apply_chat_template` does, to ids.

    Where the tokenizer hands out the text itself, the two are compared; if the marks changed what the template writes,
    the owners are not known. Else it is seen by decoding, which is much cheaper than encoding; what decodes to another
    text is encoded, and None says that the text without marks is not the one that has those ids.
    """
    if not any(message.get("role") == "user" for message in messages):
        return None  # it may need a stand-in
    if template.tokenizes_text:
        text, blocks = template.text_and_blocks(messages, prompted)
        shape = shape_of(template, messages)
        plan = None if shape is None else plan_of(template, shape, prompted)
        turns = plan and shape and regions_of(plan, shape, text, template.stops is not None)
        marks = None if turns else render_marked(template, messages, prompted, True)
        owners = marks.owners if marks is not None and marks.text == text else None
        ids, offsets = encode(template.tokenizer, text)
        whole = blocks is None or (turns and marks_are(turns.regions, blocks, offsets))
        marked = None if whole or blocks is None else block_mask(blocks, offsets)
        return _Base(text, ids, offsets, marked, owners, shape, turns or None)
    marks = render_marked(template, messages, prompted)
    if marks is None:
        return None
    ids, offsets, marked = _official(template, messages, prompted)
    if not (offsets.ends and offsets.ends[-1] == len(marks.text) and _decoded(template.tokenizer, ids) == marks.text):
        official = ids
        ids, offsets = encode(template.tokenizer, marks.text)
        if official != ids:
            return None
    return _Base(marks.text, ids, offsets, marked, marks.owners)


def _decoded(tokenizer: Any, ids: list[int]) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)  # transformers' own `decode` takes twice the time
    if backend is not None:
        return str(backend.decode(ids, skip_special_tokens=False))
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _apart(template: ChatTemplate, messages: Sequence[Message], prompted: bool, problems: list[str]) -> _Base:
    """Render to text and to ids, with a stand-in where the template demands a user message."""
    text, cut = template.text_or_cut(messages, prompted)
    plain = text if cut is None else cut.text[: cut.start] + cut.text[cut.end :]
    ids, offsets = encode(template.tokenizer, plain)
    filled = list(messages) if cut is None else template.placeholder_user(messages)[0]
    official, _, marked = _official(template, filled, prompted)
    if cut is not None:
        official, marked = _without_stand_in(template.tokenizer, official, marked, cut, problems)
    if official != ids:
        problems.append(_difference(official, ids))
    return _Base(plain, ids, offsets, marked, None)


def _official(
    template: ChatTemplate, messages: Sequence[Message], prompted: bool
) -> tuple[list[int], Offsets, list[int] | None]:
    """Return the ids of `apply_chat_template` itself, their characters, and the mask of generation marks.

    Without characters where it passes no arguments on to the tokenizer; without a mask where the template has no marks.
    """
    marked = template.has_generation_marks
    extra: dict[str, Any] = {"tokenizer_kwargs": {"return_offsets_mapping": True}}
    if marked:
        extra["return_assistant_tokens_mask"] = True
    try:
        out = template.apply(messages, prompted, tokenize=True, return_dict=True, **extra)
    except NotImplementedError as error:
        raise ValueError(NO_OFFSETS) from error
    mask = list(out["assistant_masks"]) if marked else None
    return list(out["input_ids"]), Offsets.of(out.get("offset_mapping", ())), mask


def _without_stand_in(
    tokenizer: Any, ids: list[int], mask: list[int] | None, cut: Cut, problems: list[str]
) -> tuple[list[int], list[int] | None]:
    """Return ids and mask without the tokens of a stand-in user message."""
    _, offsets = encode(tokenizer, cut.text)
    pairs = list(zip(*offsets, strict=True))
    outside = [i for i, (a, b) in enumerate(pairs) if b <= cut.start or a >= cut.end]
    dropped = [(a, b) for a, b in pairs if a < cut.end and b > cut.start]
    if dropped and (dropped[0][0] < cut.start or dropped[-1][1] > cut.end):
        problems.append("a token reaches over the border of the stand-in user message")
    return [ids[i] for i in outside], None if mask is None else [mask[i] for i in outside]


def _difference(official: list[int], ids: list[int]) -> str:
    at = next((i for i, (a, b) in enumerate(zip(official, ids, strict=False)) if a != b), min(len(official), len(ids)))
    return f"the ids differ from apply_chat_template's at token {at}"


def _spans(
    regions: Sequence[Region], proven: Sequence[Region], expanded: Expanded, offsets: Offsets
) -> tuple[tuple[AssistantSpan, ...], tuple[int, ...]]:
    """Return the tokens of the regions, and those that straddle a border of one of them or of a proven one."""
    straddling: list[int] = []
    spans = tuple(_span(region, expanded, offsets, straddling) for region in regions)
    if proven is not regions:
        same = {(region.start, region.end) for region in regions}
        for region in proven:
            if (region.start, region.end) not in same:
                _span(region, expanded, offsets, straddling)
    return spans, tuple(sorted(set(straddling)))


def _span(region: Region, expanded: Expanded, offsets: Offsets, straddling: list[int]) -> AssistantSpan:
    """Return the tokens that lie wholly in a region; those that straddle its border are listed in `straddling`."""
    start, end = expanded.move(region.start), expanded.move(region.end)
    starts, ends = offsets
    first = last = bisect_left(starts, start)
    while first and ends[first - 1] > start:
        first -= 1
    last = bisect_left(starts, end, last if start <= end else 0)
    while first < last and starts[first] < start:
        straddling.append(first)
        first += 1
    while first < last and ends[last - 1] > end:
        straddling.append(last - 1)
        last -= 1
    first, last = (first, last) if first < last else (0, 0)
    return AssistantSpan(region.message, first, last, start, end)


def _unfinished(regions: Sequence[Region], text: str, delimiters: TurnDelimiters | None) -> tuple[int, ...]:
    """Return the messages whose last trained characters are no token that ends turns."""
    stops = () if delimiters is None else delimiters.stops
    ends = {region.message: text.endswith(stops, region.start, region.end) for region in regions}
    return tuple(message for message, ended in ends.items() if not ended)


def _mask_of(spans: Sequence[AssistantSpan], length: int) -> list[bool]:
    mask = [False] * length
    for span in spans:
        mask[span.token_start : span.token_end] = [True] * (span.token_end - span.token_start)
    return mask


def owned_text(
    regions: Sequence[Region],
    pieces: Sequence[MessageSpan],
    messages: Sequence[Message],
    expanded: Expanded,
    skip: int = 0,
) -> tuple[OwnedText, ...]:
    """Return the owner of each character from `skip` on: turns first, then other messages; the rest is the template's.

    `expanded` is the text after the characters that are skipped; the positions returned are in it.
    """
    claims = [(r.start - skip, r.end - skip, r.message) for r in regions if r.message < len(messages)]
    turns = sorted(claims)
    starts = [start for start, _, _ in turns]
    for piece in pieces:
        at = bisect_right(starts, piece.start - skip) - 1
        if at < 0 or piece.start - skip >= turns[at][1]:
            claims.append((piece.start - skip, piece.end - skip, piece.message))
    owners: list[OwnedText] = []
    moved = bool(expanded.moves)
    at = 0
    for start, end, message in sorted(claims):
        if moved:
            start, end = expanded.move(max(start, 0)), expanded.move(max(end, 0))
        if start < at:
            start = at
        if end <= start:
            continue
        if start > at:
            owners.append(OwnedText(at, start, "template", None))
        owners.append(OwnedText(start, end, str(messages[message].get("role")), message))
        at = end
    if at < len(expanded.text):
        owners.append(OwnedText(at, len(expanded.text), "template", None))
    return tuple(owners)
