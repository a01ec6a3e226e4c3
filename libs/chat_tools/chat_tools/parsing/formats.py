"""Tool-call formats as data: markers, nesting and the codec of the arguments. One engine reads them all."""

from __future__ import annotations

from typing import NamedTuple

Pair = tuple[str, str]


class Tagged(NamedTuple):
    """Arguments as tagged values: NAME `name_end`, then `key[0]` KEY `key[1]` `value[0]` VALUE `value[1]` repeated.

    With `newlines`, one newline after the opening and one before the closing tag of a value belong to the tags. With
    `guess`, a value whose type nobody declares is read as JSON if it is JSON.
    """

    name_end: str
    key: Pair
    value: Pair
    newlines: bool = False
    guess: bool = False


class Json(NamedTuple):
    """`{"name": ..., "arguments": {...}}`, alone or in a list (`objects`); or a header and the arguments' object.

    `header` is a pattern of all that stands between the opening marker and the object, with a group `name` and perhaps
    `id`; its repetitions are possessive, so that it takes linear time. `after` may follow the object. `quotes` are
    further string delimiters, without escapes; keys are bare then.
    """

    objects: bool = True
    header: str = ""
    after: str = ""
    quotes: tuple[str, ...] = ()


class Pythonic(NamedTuple):
    """A list of Python calls with keyword arguments: `[f(a=1), g(b="x")]`."""


class Channels(NamedTuple):
    """Messages with headers: `start` and `channel` open a header, `message` ends it, one of `ends` ends the text.

    The channel named `reasoning` is reasoning; where the pattern `recipient` finds a `name`, the message is a call.
    """

    start: str
    channel: str
    message: str
    ends: tuple[str, ...]
    reasoning: str
    recipient: str


class Format(NamedTuple):
    """A format of assistant turns.

    `calls` are the markers of one call (no closing one: the body ends itself), `section` a wrapper around calls,
    `reasoning` the markers of thinking, `ends` the tokens that end a turn. Calls stand inside the section only, or with
    `bare` at the beginning of a line too; `opening` is what begins a call without a marker if it begins the answer.
    """

    name: str
    calls: tuple[Pair, ...]
    body: Tagged | Json | Pythonic | Channels
    section: Pair | None = None
    reasoning: tuple[Pair, ...] = (("<think>", "</think>"),)
    ends: tuple[str, ...] = ()
    bare: bool = False
    opening: str = ""


_CHATML = ("<|im_end|>", "<|endoftext|>")


def _deepseek(name: str, body: Json) -> Format:
    return Format(
        name,
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        calls=(("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),),
        body=body,
        ends=("<｜end▁of▁sentence｜>",),
        bare=True,
    )


def _words(stops: str, other: str = "") -> str:
    """Match words of a line, without the white space after them; in linear time, unlike a lazy pattern."""
    return rf"(?:[^\s{stops}]++|[^\S\n]++(?=[^\s{stops[0]}]){'|' + other if other else ''})*+"


_NUMBERED = _words("<:", r":(?!\d+\s*+<)")  # a colon and a number at the end are not the name's
_ALL = (
    Format(
        "qwen3_xml",
        section=("<tool_call>", "</tool_call>"),
        calls=(("<function=", "</function>"),),
        body=Tagged(name_end=">", key=("<parameter=", ">"), value=("", "</parameter>"), newlines=True),
        ends=_CHATML,
        bare=True,
    ),
    Format("hermes", calls=(("<tool_call>", "</tool_call>"),), body=Json(), ends=_CHATML),
    Format(
        "llama3_json",
        calls=(("<|python_tag|>", ""),),
        body=Json(),
        ends=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|eot|>", "<|eom|>"),
        opening="{",
    ),
    Format(
        "pythonic",
        calls=(("<|python_start|>", "<|python_end|>"),),
        body=Pythonic(),
        ends=("<|eot|>", "<|eot_id|>", "<|eom|>"),
        opening="[",
    ),
    Format(
        "mistral",
        calls=(("[TOOL_CALLS]", ""),),
        body=Json(header=r"(?P<name>[^\s\[{]++)\s*+(?:\[CALL_ID\](?P<id>[^\[{]*+))?(?:\[ARGS\])?"),
        reasoning=(("[THINK]", "[/THINK]"), ("<think>", "</think>")),
        ends=("</s>",),
    ),
    _deepseek(
        "deepseek_v3",
        Json(objects=False, header=rf"\w++<｜tool▁sep｜>(?P<name>{_words('<`')})\s*+```(?:json)?", after="```"),
    ),
    _deepseek("deepseek_v3.1", Json(objects=False, header=rf"(?P<name>{_words('<')})\s*+<｜tool▁sep｜>")),
    Format(
        "glm-4.5",
        calls=(("<tool_call>", "</tool_call>"),),
        body=Tagged(name_end="\n", key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>"), guess=True),
        ends=("<|user|>", "<|observation|>", "<|endoftext|>"),
    ),
    Format(
        "kimi_k2",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        calls=(("<|tool_call_begin|>", "<|tool_call_end|>"),),
        body=Json(
            objects=False,
            header=rf"(?P<id>(?:functions\.)?(?P<name>{_NUMBERED})(?::\d+)?)"
            r"\s*+<\|tool_call_argument_begin\|>",
        ),
        ends=("<|im_end|>", "[EOS]"),
        bare=True,
    ),
    Format(
        "minimax",
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        calls=(('<invoke name="', "</invoke>"),),
        body=Tagged(name_end='">', key=('<parameter name="', '">'), value=("", "</parameter>")),
        ends=("[e~[",),
        bare=True,
    ),
    Format(
        "granite",
        calls=(("<|tool_call|>", ""), ("<tool_call>", "</tool_call>")),
        body=Json(),
        ends=("<|end_of_text|>",),
    ),
    Format(
        "harmony",
        calls=(),
        body=Channels(
            start="<|start|>",
            channel="<|channel|>",
            message="<|message|>",
            ends=("<|end|>", "<|call|>", "<|return|>"),
            reasoning="analysis",
            recipient=r"\bto=(?:functions\.)?(?P<name>[^\s<]*)",
        ),
        reasoning=(),
    ),
    Format(
        "seed",
        section=("<seed:tool_call>", "</seed:tool_call>"),
        calls=(("<function=", "</function>"),),
        body=Tagged(name_end=">", key=("<parameter=", ">"), value=("", "</parameter>")),
        reasoning=(("<seed:think>", "</seed:think>"),),
        ends=("<seed:eos>",),
        bare=True,
    ),
    Format(
        "gemma",
        calls=(("<|tool_call>", "<tool_call|>"), ("<start_function_call>", "<end_function_call>")),
        body=Json(objects=False, header=r"call:(?P<name>[^\s{]*)", quotes=('<|"|>', "<escape>")),
        reasoning=(("<|channel>thought", "<channel|>"),),
        opening="call:",
        ends=("<turn|>", "<end_of_turn>", "<|tool_response>", "<start_function_response>"),
    ),
)

FORMATS: dict[str, Format] = {f.name: f for f in _ALL}
# Other names of the formats, as the peers' parsers, the models or the templates are called.
ALIASES = {
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v3.1",
    "functiongemma": "gemma",
    "glm-4.7": "glm-4.5",
    "glm47": "glm-4.5",
    "granite4": "granite",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "openai": "harmony",
    "qwen25": "hermes",
    "deepseek_v31": "deepseek_v3.1",
    "gemma4": "gemma",
    "glm": "glm-4.5",
    "glm45": "glm-4.5",
    "gpt-oss": "harmony",
    "gpt_oss": "harmony",
    "kimi": "kimi_k2",
    "minimax_m2": "minimax",
    "qwen3_5": "qwen3_xml",
    "qwen3_coder": "qwen3_xml",
    "seed_oss": "seed",
}


def formats() -> list[str]:
    """List the names of the formats."""
    return sorted(FORMATS)


def find_format(name: str | Format) -> Format:
    """Return the format of that name; a ValueError lists the names there are."""
    if isinstance(name, Format):
        return name
    name = ALIASES.get(name, name)
    if name not in FORMATS:
        raise ValueError(f"unknown tool-call format {name!r}; one of: {', '.join(formats())}")
    return FORMATS[name]
