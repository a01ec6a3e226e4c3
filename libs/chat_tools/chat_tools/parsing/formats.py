"""Tool-call formats as data: one entry a format. One engine reads them all; `grammar.py` says what an entry means."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from chat_tools.known_formats import writing
from chat_tools.known_formats.bracket_entries import BRACKET_ENTRIES
from chat_tools.known_formats.grammar import Call, Channels, Elements, Format, Json, Pythonic, Recipients, Tagged
from chat_tools.known_formats.servers import REFUSED, plain_name
from chat_tools.known_formats.tagged_entries import CHATML, TAGGED_ENTRIES, WITH_SUFFIX

Writer = Callable[[Format, Sequence[Call]], str]


def _deepseek(name: str, body: Json, aliases: tuple[str, ...], writer: Writer, sign: str = "") -> Format:
    return Format(
        name,
        aliases=aliases,
        writer=writer,
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        calls=(("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),),
        body=body,
        ends=("<｜end▁of▁sentence｜>",),
        bare=True,
        sign=sign,
    )


def _words(stops: str, other: str = "") -> str:
    """Return a pattern of words in a line, without the white space after them; in linear time, unlike a lazy one."""
    return rf"(?:[^\s{stops}]++|[^\S\n]++(?=[^\s{stops[0]}]){'|' + other if other else ''})*+"


_NUMBERED = _words("<:", r":(?!\d+\s*+<)")  # a colon and a number at the end are not the name's
_ALL = (
    Format(
        "qwen3_xml",
        aliases=(
            "qwen3_5",
            "qwen3_coder",
            "qwen3",
            "nemotron_v3",
            "step3p5",
            "step5",
            "nanbeige",
        ),
        writer=writing.section_of_each,
        section=("<tool_call>", "</tool_call>"),
        calls=(("<function=", "</function>"),),
        body=Tagged(name_end=">", key=("<parameter=", ">"), value=("", "</parameter>"), newlines=True),
        ends=CHATML,
        bare=True,
        call_ends_reasoning=True,
    ),
    Format(
        "hermes",
        aliases=("qwen", "qwen25", "qwen3_json"),
        writer=writing.objects,
        calls=(("<tool_call>", "</tool_call>"),),
        body=Json(),
        ends=CHATML,
    ),
    Format(
        "llama3_json",
        aliases=(
            "llama3",
            "llama4_json",
        ),
        writer=writing.parameter_objects,
        calls=(("<|python_tag|>", ""),),
        body=Json(),
        ends=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|eot|>", "<|eom|>"),
        opening="{",
    ),
    Format(
        "pythonic",
        aliases=("llama4_pythonic",),
        writer=writing.python_list,
        calls=(("<|python_start|>", "<|python_end|>"),),
        body=Pythonic(),
        ends=("<|eot|>", "<|eot_id|>", "<|eom|>"),
        opening="[",
    ),
    Format(
        "mistral",
        writer=writing.after_marker,
        calls=(("[TOOL_CALLS]", ""),),
        body=Json(header=r"(?P<name>[^\s\[{]++)\s*+(?:\[CALL_ID\](?P<id>[^\[{]*+))?(?:\[ARGS\])?"),
        reasoning=(("[THINK]", "[/THINK]"), ("<think>", "</think>")),
        ends=("</s>",),
        call_ends_reasoning=True,
    ),
    _deepseek(
        "deepseek_v3",
        Json(objects=False, header=rf"\w++<｜tool▁sep｜>(?P<name>{_words('<`')})\s*+```(?:json)?", after="```"),
        ("deepseekv3",),
        writing.fenced,
        sign="```json",
    ),
    _deepseek(
        "deepseek_v3.1",
        Json(objects=False, header=rf"(?P<name>{_words('<')})\s*+<｜tool▁sep｜>"),
        ("deepseekv31", "deepseek_v31"),
        writing.after_separator,
    ),
    Format(
        "glm-4.5",
        aliases=(
            "glm",
            "glm45",
        ),
        writer=writing.tagged,
        calls=(("<tool_call>", "</tool_call>"),),
        body=Tagged(name_end="\n", key=("<arg_key>", "</arg_key>"), value=("<arg_value>", "</arg_value>"), guess=True),
        ends=("<|user|>", "<|observation|>", "<|endoftext|>"),
        call_ends_reasoning=True,
    ),
    Format(
        "kimi_k2",
        aliases=("kimi",),
        writer=writing.numbered,
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        calls=(("<|tool_call_begin|>", "<|tool_call_end|>"),),
        body=Json(
            objects=False,
            header=rf"(?P<id>(?:functions\.)?(?P<name>{_NUMBERED})(?::\d+)?)"
            r"\s*+<\|tool_call_argument_begin\|>",
        ),
        ends=("<|im_end|>", "[EOS]"),
        bare=True,
        call_ends_reasoning=True,
    ),
    Format(
        "kimi_k3",
        writer=writing.with_attributes,
        section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        calls=(('<|open|>call tool="', "<|close|>call<|sep|>"),),
        body=Tagged(
            name_end="<|sep|>",
            key=('<|open|>argument key="', "<|sep|>"),
            value=("", "<|close|>argument<|sep|>"),
            attribute="type",
            kinds=("string", "number", "integer", "boolean", "null", "object", "array"),
            entities=True,
        ),
        reasoning=(("<|open|>think<|sep|>", "<|close|>think<|sep|>"),),
        ends=(
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
            "<|end_of_msg|>",
        ),
        bare=True,
    ),
    Format(
        "minimax",
        aliases=("minimax_m2", "minimax-m2"),
        writer=writing.tagged,
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        calls=(('<invoke name="', "</invoke>"),),
        body=Tagged(name_end='">', key=('<parameter name="', '">'), value=("", "</parameter>")),
        ends=("[e~[",),
        bare=True,
        call_ends_reasoning=True,
    ),
    Format(
        "minimax_m3",
        aliases=("minimax-m3",),
        writer=writing.elements,
        section=("]<]minimax[>[<tool_call>", "]<]minimax[>[</tool_call>"),
        calls=((']<]minimax[>[<invoke name="', "]<]minimax[>[</invoke>"),),
        body=Elements("]<]minimax[>["),
        reasoning=(("<mm:think>", "</mm:think>"),),
        ends=("[e~[",),
        bare=True,
    ),
    Format(
        "muse_glimmer",
        aliases=("muse", "musespark1x"),
        writer=writing.tagged_messages,
        section=("<atem:function_calls>", "</atem:function_calls>"),
        calls=(('<atem:invoke name="', "</atem:invoke>"),),
        body=Tagged(name_end='">', key=('<atem:parameter name="', '">'), value=("", "</atem:parameter>"), guess=True),
        reasoning=(),
        ends=("<|eom|>", "<|eot|>", "<|start|>assistant"),
        recipients=Recipients(" to=", "<|message|>", "self", "user"),
        call_ends_reasoning=True,
    ),
    Format(
        "granite4",  # before granite, which reads its calls too
        writer=writing.objects,
        calls=(("<tool_call>", "</tool_call>"),),
        body=Json(),
        ends=("<|end_of_text|>",),
    ),
    Format(
        "granite",
        writer=writing.one_list,
        calls=(("<|tool_call|>", ""), ("<tool_call>", "</tool_call>")),
        body=Json(),
        ends=("<|end_of_text|>",),
    ),
    Format(
        "harmony",
        aliases=(
            "gpt-oss",
            "gpt_oss",
            "openai",
        ),
        writer=writing.messages,
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
        aliases=("seed_oss",),
        writer=writing.tagged,
        section=("<seed:tool_call>", "</seed:tool_call>"),
        calls=(("<function=", "</function>"),),
        body=Tagged(name_end=">", key=("<parameter=", ">"), value=("", "</parameter>")),
        reasoning=(("<seed:think>", "</seed:think>"),),
        ends=("<seed:eos>",),
        bare=True,
        call_ends_reasoning=True,
    ),
    Format(
        "functiongemma",  # before gemma, which reads its calls too
        writer=writing.bare_keys,
        calls=(("<start_function_call>", "<end_function_call>"),),
        body=Json(objects=False, header=r"(?:call)?+:(?P<name>[^\s{]*)", quotes=("<escape>",)),
        ends=("<end_of_turn>", "<start_function_response>"),
        call_ends_reasoning=True,
    ),
    Format(
        "gemma",
        aliases=("gemma4",),
        writer=writing.bare_keys,
        calls=(("<|tool_call>", "<tool_call|>"), ("<start_function_call>", "<end_function_call>")),
        body=Json(objects=False, header=r"(?:call)?+:(?P<name>[^\s{]*)", quotes=('<|"|>', "<escape>")),
        reasoning=(("<|channel>thought", "<channel|>"),),
        opening="call:",
        ends=("<turn|>", "<end_of_turn>", "<|tool_response>", "<start_function_response>"),
        call_ends_reasoning=True,
    ),
    Format(
        "olmo3",
        writer=writing.python_lines,
        calls=(("<function_calls>", "</function_calls>"),),
        body=Pythonic(brackets=False),
        ends=CHATML,
    ),
    Format(
        "lfm2",
        aliases=("lfm2.5",),
        writer=writing.python_list,
        calls=(("<|tool_call_start|>", "<|tool_call_end|>"),),
        body=Pythonic(objects=True),
        ends=CHATML,
    ),
    Format(
        "lfm2_json",
        writer=writing.one_list,
        calls=(("<|tool_call_start|>", "<|tool_call_end|>"),),
        body=Json(),
        ends=CHATML,
    ),
    Format(
        "step3",
        writer=writing.tagged_in_one_line,
        section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        calls=(
            (
                '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="',
                "</steptml:invoke><｜tool_call_end｜>",
            ),
        ),
        body=Tagged(name_end='">', key=('<steptml:parameter name="', '">'), value=("", "</steptml:parameter>")),
        ends=("<|EOT|>",),
    ),
    Format(
        "xlam",
        writer=writing.bare_list,
        calls=(("[TOOL_CALLS]", ""), ("<tool_call>", "</tool_call>")),
        body=Json(),
        ends=(*CHATML, "<|eot_id|>"),
        opening="[",
    ),
    Format(
        "phi4_mini",
        aliases=("phi4_mini_json",),
        writer=writing.one_list,
        calls=(),
        body=Json(lead="functools"),
        ends=("<|end|>", "<|endoftext|>", "<|tool_response|>"),
        opening="functools[",
        sign="functools",
    ),
    Format(
        "hunyuan",
        aliases=("hunyuan_a13b", "jamba"),
        writer=writing.one_list,
        calls=(("<tool_calls>", "</tool_calls>"),),
        body=Json(),
        ends=("<|eos|>", "<|endoftext|>"),
    ),
    Format(
        "longcat",
        writer=writing.objects,
        calls=(("<longcat_tool_call>", "</longcat_tool_call>"),),
        body=Json(),
        reasoning=(("<longcat_think>", "</longcat_think>"),),
        ends=("</longcat_s>",),
    ),
    Format(
        "ernie45",
        aliases=("ernie", "ernie4.5"),
        writer=writing.objects,
        calls=(("<tool_call>", "</tool_call>"),),
        body=Json(),
        ends=("<response>", "</response>", "</s>", "<|im_end|>"),
        sign="<response>",
    ),
    Format(
        "internlm2",
        aliases=("internlm", "interns1"),
        writer=writing.marked_parameters,
        calls=(("<|action_start|><|plugin|>", "<|action_end|>"), ("<|action_start|> <|plugin|>", "<|action_end|>")),
        body=Json(),
        ends=("<|im_end|>",),
    ),
    Format(
        "apertus",
        aliases=("apertus2509",),
        writer=writing.keyed_list,
        calls=(("<|tools_prefix|>", "<|tools_suffix|>"),),
        body=Json(keyed=True),
        reasoning=(("<|inner_prefix|>", "<|inner_suffix|>"),),
        ends=("<|assistant_end|>",),
    ),
    Format(
        "cohere",
        aliases=("command", "cohere_command", "cohere_command3", "cohere_command4"),
        writer=writing.numbered_list,
        calls=(("<|START_ACTION|>", "<|END_ACTION|>"),),
        body=Json(),
        reasoning=(("<|START_THINKING|>", "<|END_THINKING|>"),),
        ends=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|END_OF_TURN_TOKEN|>"),
    ),
    Format(
        "gigachat3",
        writer=writing.marked_objects,
        calls=(("function call<|role_sep|>", ""), ("<|function_call|>", "")),  # version 3, version 3.1
        body=Json(),
        ends=("</s>", "<|message_sep|>"),
    ),
    *TAGGED_ENTRIES,
    *BRACKET_ENTRIES,
)

FORMATS: dict[str, Format] = {f.name: f for f in _ALL}
ALIASES = {alias: f.name for f in _ALL for alias in f.aliases}


def formats() -> list[str]:
    """Return the names of the formats."""
    return sorted(FORMATS)


def find_format(name: str | Format) -> Format:
    """Return the format of that name, of that alias, or of a server's name (`vllm:NAME`, `sglang:NAME`).

    `hy_v3:SUFFIX` and `hy_v4:SUFFIX` are for a checkpoint whose tags end with a colon and a word. ValueError with all
    names for one that is not known, and with the reason for one that is known and not read.
    """
    if isinstance(name, Format):
        return name
    plain = plain_name(name)
    plain = ALIASES.get(plain, plain)
    family, colon, suffix = plain.partition(":")
    if colon and family in WITH_SUFFIX and re.fullmatch(r"[\w.-]+", suffix):
        return WITH_SUFFIX[family](colon + suffix)
    if plain in REFUSED:
        raise ValueError(f"the tool-call format {name!r} is not read: {REFUSED[plain]}")
    if plain not in FORMATS:
        raise ValueError(f"unknown tool-call format {name!r}; one of: {', '.join(formats())}")
    return FORMATS[plain]
