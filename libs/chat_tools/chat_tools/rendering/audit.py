"""Is a chat template fit for training? Whether earlier turns stay as they are, and whether the mask is safe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, takewhile
from typing import Any

from chat_tools.rendering.continuation import extend
from chat_tools.rendering.format_detection import detect_format
from chat_tools.rendering.masks import CALLS_LEFT_OUT, LOST, find_regions
from chat_tools.rendering.render import render
from chat_tools.rendering.replaced_messages import common_prefix
from chat_tools.rendering.template import ChatTemplate, Message, rendering_errors, template_errors, tokens_as_text
from chat_tools.rendering.turn_delimiters import find_turn_delimiters

_CALL = {"type": "function", "function": {"name": "look_up", "arguments": {"word": "blue"}}}
_TOOL = {"type": "function", "function": {"name": "look_up", "description": "Look up.", "parameters": {}}}


def _call(number: int) -> dict[str, Any]:
    return {**_CALL, "id": f"call0000{number}"}


def _tool(number: int) -> Message:
    return {"role": "tool", "name": "look_up", "tool_call_id": f"call0000{number}", "content": f"result {number}"}


_ASK: Message = {"role": "user", "content": "What is blue?"}
_MORE: Message = {"role": "user", "content": "And green?"}
_SAY: Message = {"role": "assistant", "content": "A colour."}
_THINK: Message = {"role": "assistant", "content": "A colour.", "reasoning_content": "They ask for blue."}
_ASK_TOOL: Message = {"role": "assistant", "content": "", "tool_calls": [_call(1)]}
_ASK_TOOLS: Message = {"role": "assistant", "content": "", "tool_calls": [_call(1), _call(2)]}
_SPACE: Message = {"role": "assistant", "content": "A colour.\n"}

# feature: a conversation that shows it; the features are tried from the plainest on
PROBES: dict[str, list[Message]] = {
    "plain turns": [_ASK, _SAY, _MORE, _SAY],
    "system message": [{"role": "system", "content": "Be brief."}, _ASK, _SAY, _MORE, _SAY],
    "thinking": [_ASK, _THINK, _MORE, _THINK],
    "tool result": [_ASK, _ASK_TOOL, _tool(1), _SAY, _MORE, _SAY],
    "thinking between tool calls": [_ASK, {**_ASK_TOOL, **_THINK, "content": ""}, _tool(1), _THINK, _MORE, _THINK],
    "two tool results": [_ASK, _ASK_TOOLS, _tool(1), _tool(2), _SAY],
    "trailing newline": [_ASK, _SPACE, _MORE, _SPACE],
}


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token by which a longer conversation does not continue a shorter one.

    The first `messages` messages were rendered (with the generation prompt if `prompted`), then one more; `expected` is
    the token that the shorter rendering has at place `token`, `found` that of the longer, `context` the text before.
    `cause` is the template's property that does it, seen in the conversation called `feature`.
    """

    cause: str
    feature: str
    messages: int
    prompted: bool
    token: int
    expected: str
    found: str
    context: str

    def __str__(self) -> str:
        prompt = " and the generation prompt" if self.prompted else ""
        return (
            f"{self.cause}: in {self.feature!r}, after {self.messages} messages{prompt}, token {self.token} "
            f"{self.expected!r} becomes {self.found!r} (after {self.context!r})"
        )


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """The result of an audit. `divergences` has the first one of each cause; `notes` are no faults."""

    prefix_preserving: bool
    mask_safe: bool
    format: str | None
    generation_marks: bool
    demands_user: bool
    generation_prompt: str
    end_of_turn: str
    separator: str
    divergences: tuple[Divergence, ...]
    mask_problems: tuple[str, ...]
    notes: tuple[str, ...]
    extension_problems: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return asdict(self)

    def __str__(self) -> str:
        rows = [
            ("prefix-preserving", "yes" if self.prefix_preserving else "NO"),
            ("training mask", "safe" if self.mask_safe else "NOT SAFE"),
            ("extend", "NOT SAFE" if self.extension_problems else "safe"),
            ("mask from", "the template's generation marks" if self.generation_marks else "rendering with other words"),
            ("tool calls", self.format or "no known format"),
            ("generation prompt", repr(self.generation_prompt)),
            ("end of turn", repr(self.end_of_turn) if self.end_of_turn else "none"),
            ("turn separator", repr(self.separator) if self.separator else "none"),
            ("demands a user message", "yes" if self.demands_user else "no"),
        ]
        lines = [f"{name:<24}{value}" for name, value in rows]
        for title, items in (
            ("diverges", self.divergences),
            ("mask", self.mask_problems),
            ("extend", self.extension_problems),
            ("note", self.notes),
        ):
            lines += [f"{title:<24}{item}" for item in items]
        return "\n".join(lines)


def audit_template(
    tokenizer: Any,
    tools: Sequence[Any] | None = None,
    *,
    stop_tokens: Iterable[str | int] | None = None,
    **options: Any,
) -> TemplateReport:
    """Try a tokenizer's chat template on generated conversations, one feature at a time.

    Prefix-preserving: each rendering continues the one without its last message, and that one's generation prompt.
    Otherwise a later rendering has other tokens than those that were sampled: use `extend`. The mask is safe if it can
    be proven for every conversation, and agrees with the template's own marks if it has some. `extension_problems` say
    where a turn that was sampled as the template writes it, and extended, is not the longer rendering.
    """
    stops = None if stop_tokens is None else tokens_as_text(stop_tokens, tokenizer)
    template = ChatTemplate(tokenizer, tools, options, stops)
    divergences: list[Divergence] = []
    problems: list[str] = []
    broken: list[str] = []
    notes: list[str] = []
    if not tools and not _renders(template) and _renders(with_tool := ChatTemplate(tokenizer, [_TOOL], options, stops)):
        template = with_tool
        notes.append("the template needs tools: it was tried with one")
    plain: Sequence[Message] = ()
    for feature, probe in PROBES.items():
        messages = _accepted(template, feature, probe, notes)
        if messages is None:
            continue
        differences = list(_divergences(template, feature, messages))
        trouble = _mask_problems(template, messages)
        for divergence in differences:
            if divergence.cause not in {d.cause for d in divergences}:
                divergences.append(divergence)
        problems += [f"{feature}: {problem}" for problem in trouble if not problem.endswith((CALLS_LEFT_OUT, LOST))]
        left_out = [text for text in (CALLS_LEFT_OUT, LOST) if any(problem.endswith(text) for problem in trouble)]
        notes += [
            f"{feature}: {text}; this is a problem of the row, and such a turn is not trained" for text in left_out
        ]
        if not trouble:
            broken += [f"{feature}: {problem}" for problem in _extension_problems(template, messages)]
        plain = plain or messages
    say = plain[1] if plain else _SAY
    delimiters = find_turn_delimiters(template, say)
    end = delimiters.ends[0] if delimiters.ends else delimiters.closing.rstrip()
    notes += [*_stop_notes(delimiters.ends, stops), *_notes(template, plain)]
    return TemplateReport(
        prefix_preserving=not divergences,
        mask_safe=not problems,
        format=_format(tokenizer),
        generation_marks=template.has_generation_marks,
        demands_user=_demands_user(template),
        generation_prompt=delimiters.prompt,
        end_of_turn=end,
        separator=delimiters.closing[len(end) :] if delimiters.closing.startswith(end) else "",
        divergences=tuple(divergences),
        mask_problems=tuple(problems),
        notes=tuple(notes),
        extension_problems=tuple(broken),
    )


def _stop_notes(ends: Sequence[str], stops: Iterable[str] | None) -> Iterator[str]:
    """Yield a note where no end of a turn holds a stop token of the model."""
    if stops and ends and not any(stop in end for end in ends for stop in stops):
        yield f"the template ends turns with {ends[0]!r}, which holds no stop token of the model"


def _renders(template: ChatTemplate) -> bool:
    try:
        template.text([_ASK, _SAY])
    except rendering_errors():
        return False
    return True


def _extension_problems(template: ChatTemplate, messages: Sequence[Message]) -> Iterator[str]:
    """Sample each turn as the template writes it, extend it, and yield where that is not the longer rendering."""
    given: dict[str, Any] = {"tools": template.tools, "stop_tokens": template.stops, **template.options}
    for number in [n for n, message in enumerate(messages[:-1]) if message["role"] == "assistant"]:
        others = list(takewhile(lambda message: message["role"] != "assistant", messages[number + 1 :]))
        if not others:
            continue
        prompt = render(template.tokenizer, messages[:number], add_generation_prompt=True, **given)
        whole = render(template.tokenizer, messages[: number + 1 + len(others)], add_generation_prompt=True, **given)
        turn = [span for span in whole.spans if span.message == number]
        if len(turn) != 1 or whole.text[: turn[0].start] != prompt.text:
            continue  # the template writes it in another way once it is answered: a divergence, told as such
        said = template.tokenizer(whole.text[turn[0].start : turn[0].end], add_special_tokens=False)["input_ids"]
        try:
            longer = extend(prompt.generated(said, messages[number]), others)
        except ValueError as error:
            yield f"after message {number}: {error}"
            continue
        if longer.text != whole.text:
            at = common_prefix(longer.text, whole.text)
            here, there = longer.text[at : at + 40], whole.text[at : at + 40]
            yield f"after message {number}: extend writes {here!r} where the template writes {there!r}"


def _accepted(
    template: ChatTemplate, feature: str, messages: Sequence[Message], notes: list[str]
) -> Sequence[Message] | None:
    """Return the conversation in the first form that the template accepts; None, with a note, if it accepts none.

    Calls' arguments are tried as values and as JSON text, the content beside calls as "" and as None, contents as
    lists of parts.
    """
    refusal = ""
    for form, changed in _forms(messages):
        try:
            texts = [template.text(changed[:n]) for n in range(1, len(changed) + 1)]
            for n, message in enumerate(changed):
                if message["role"] == "assistant":
                    template.text(changed[:n], add_generation_prompt=True)
        except rendering_errors() as error:
            refusal = refusal or str(error)
            continue
        said = _shown(messages[-1])
        if said is not None and said not in texts[-1]:
            refusal = refusal or "it leaves out what is said"
            continue
        if form:
            notes.append(f"{feature}: the template takes {form}")
        return changed
    notes.append(f"{feature}: the template refuses it ({refusal})")
    return None


def _shown(message: Message) -> str | None:
    return str(message["content"]).strip() or None


def _forms(messages: Sequence[Message]) -> Iterator[tuple[str, list[Message]]]:
    """Yield the forms of a conversation that templates expect, each with its name."""
    calls = any(message.get("tool_calls") for message in messages)
    for as_text in (False, True) if calls else (False,):
        for as_none in (False, True) if calls else (False,):
            names = ["arguments as JSON text"] * as_text + ["None as the content beside calls"] * as_none
            yield " and ".join(names), [_form(message, as_text, as_none) for message in messages]
    yield (
        "contents as lists of parts",
        [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages],
    )


def _form(message: Message, as_text: bool, as_none: bool) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    changed = []
    for call in calls:
        function = call["function"]
        changed.append(
            {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}} if as_text else call
        )
    return {**message, "tool_calls": changed, "content": None if as_none else message["content"]}


def _divergences(template: ChatTemplate, feature: str, messages: Sequence[Message]) -> Iterator[Divergence]:
    """Compare each beginning of a conversation with the next longer one, and yield the differences."""
    texts = [template.text(messages[:n]) for n in range(1, len(messages) + 1)]
    pairs = [(n, False, text, texts[n]) for n, text in enumerate(texts[:-1], start=1)]
    answers = [n for n in range(1, len(messages)) if messages[n]["role"] == "assistant"]
    pairs += [(n, True, template.text(messages[:n], add_generation_prompt=True), texts[n]) for n in answers]
    said = [str(m["content"]) for m in messages if m["role"] == "assistant"]
    if feature == "trailing newline" and said[0] not in texts[-1]:
        pairs.append((2, False, texts[1].replace(said[0].rstrip(), said[0], 1), texts[-1]))
    for n, prompted, shorter, longer in pairs:
        if divergence := _first_difference(template, feature, messages[: n + 1], prompted, shorter, longer):
            yield divergence


def _first_difference(
    template: ChatTemplate, feature: str, messages: Sequence[Message], prompted: bool, shorter: str, longer: str
) -> Divergence | None:
    tokenizer = template.tokenizer
    a = list(tokenizer(shorter, add_special_tokens=False)["input_ids"])
    b = list(tokenizer(longer, add_special_tokens=False)["input_ids"])
    at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if at == len(a):
        return None
    where = common_prefix(shorter, longer)
    expected, actual = (tokenizer.decode(ids[at : at + 1]) for ids in (a, b))
    cause = _cause(template, feature, messages, shorter, longer, where)
    return Divergence(
        cause, feature, len(messages) - 1, prompted, at, expected, actual, shorter[max(0, where - 30) : where]
    )


def _cause(
    template: ChatTemplate, feature: str, messages: Sequence[Message], shorter: str, longer: str, where: int
) -> str:
    """Return the property of a template by which a longer conversation differs."""
    if where == len(shorter):
        return "joined tokens"
    if [m["role"] for m in messages[-2:]] == ["tool", "tool"]:
        return "merged tool results"
    rest = shorter[where:]
    if feature == "trailing newline" and rest[0].isspace():
        return "trailing newline"
    if "think" in rest[:40].lower() or str(_THINK["reasoning_content"]) in rest:
        return "dropped thinking"
    specials = [token for token in getattr(template.tokenizer, "all_special_tokens", ()) if token]
    ends = [
        text.rfind(t, 0, where + len(t)) + len(t) > where for text in (shorter, longer) for t in specials if t in text
    ]
    return "another end of turn" if rest and any(ends) else feature


def _mask_problems(template: ChatTemplate, messages: Sequence[Message]) -> list[str]:
    rendered = render(template.tokenizer, messages, template.tools, stop_tokens=template.stops, **template.options)
    problems = list(rendered.problems)
    if template.has_generation_marks:
        regions, unproven = find_regions(template, messages, rendered.text, False)[:2]
        problems += [problem for problem in unproven if problem not in problems]
        trained = {(span.message, span.start, span.end) for span in rendered.spans}
        for message, start, _, end in regions:
            if (message, start, end) not in trained:
                marked = "".join(
                    rendered.text[span.start : span.end] for span in rendered.spans if span.message == message
                )
                written = rendered.text[start:end]
                problems.append(f"message {message}: the template marks {marked!r}, the model would write {written!r}")
    return problems


def _notes(template: ChatTemplate, plain: Sequence[Message]) -> list[str]:
    notes = []
    if plain:
        text = template.text(plain)
        regions = find_regions(template, plain, text, False).regions
        if all(region.end == region.body_end for region in regions):
            notes.append("no token ends an assistant turn: training does not teach the model to stop")
        elif regions[-1].end == regions[-1].body_end:
            notes.append("no token ends the last turn of a conversation: training does not teach to stop there")
        notes += _excess(template, plain)
    try:
        text = template.text([_ASK, _THINK])
    except template_errors():
        return notes
    if _THINK["reasoning_content"] not in text:
        notes.append("reasoning_content is not rendered: put the thinking into the content, or another key")
    return notes


def _excess(template: ChatTemplate, messages: Sequence[Message]) -> list[str]:
    """Return the kinds of text in the template's own marks that the model does not write."""
    if not template.has_generation_marks:
        return []
    out = template.apply(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    ours = render(template.tokenizer, messages, template.tools, stop_tokens=template.stops, **template.options)
    if len(out["assistant_masks"]) != len(ours.ids):
        return []
    excess = [bool(theirs) and not own for theirs, own in zip(out["assistant_masks"], ours.assistant_mask, strict=True)]
    runs = [[ours.ids[i] for i in run] for on, run in groupby(range(len(excess)), key=excess.__getitem__) if on]
    texts = dict.fromkeys(repr(template.tokenizer.decode(run)) for run in runs)
    return (
        [f"the template's marks hold {', '.join(texts)} too, which the model does not write: not trained"]
        if runs
        else []
    )


def _demands_user(template: ChatTemplate) -> bool:
    try:
        template.apply([_SAY], tokenize=False)
    except rendering_errors():
        return True
    return False


def _format(tokenizer: Any) -> str | None:
    try:
        return detect_format(tokenizer)
    except ValueError:
        return None
