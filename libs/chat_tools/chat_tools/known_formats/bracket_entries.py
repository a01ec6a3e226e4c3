"""Formats whose calls are objects of JSON behind a marker or a header."""

from __future__ import annotations

from chat_tools.known_formats import writing
from chat_tools.known_formats.grammar import Format, Json

_PLAMO = "<|plamo:{}:plamo|>"
_PLAMO_ARGUMENTS = _PLAMO.format("begin_tool_arguments") + "<|plamo:constrain|>json<|plamo:msg|>"


def _escaped(text: str) -> str:
    return text.replace("|", r"\|")


BRACKET_ENTRIES = (
    Format(
        "solar",
        writer=writing.with_ids,
        section=("<|tool_calls|>", "<|calls|>"),
        calls=(("<|tool_call:begin|>", "<|tool_call:end|>"),),
        body=Json(
            objects=False,
            header=r"(?P<id>[^<\s]*+)<\|tool_call:name\|>(?P<name>[^<\s]++)<\|tool_call:args\|>",
        ),
        reasoning=(("<|think|>", "<|end|>"),),
        ends=("<|begin|>assistant", "<|content|>", "<|end|>"),
        bare=True,
    ),
    Format(
        "plamo3",
        writer=writing.named_objects,
        section=(_PLAMO.format("begin_tool_requests"), _PLAMO.format("end_tool_requests")),
        calls=((_PLAMO.format("begin_tool_request"), _PLAMO.format("end_tool_request")),),
        body=Json(
            objects=False,
            header=_escaped(_PLAMO.format("begin_tool_name"))
            + r"(?P<name>[^<\s]++)"
            + _escaped(_PLAMO.format("end_tool_name"))
            + r"\s*+"
            + _escaped(_PLAMO_ARGUMENTS),
            after=_PLAMO.format("end_tool_arguments"),
        ),
        reasoning=((_PLAMO.format("begin_think"), _PLAMO.format("end_think")),),
        ends=("<|plamo:tag|>",),
        call_ends_reasoning=True,
    ),
    Format(
        "granite-20b-fc",
        writer=writing.marked_objects,
        calls=(("<function_call>", ""),),
        body=Json(),
        ends=("<|endoftext|>",),
    ),
    Format(
        "nemotron",
        aliases=("nemotron_v2", "nemotron_json"),
        writer=writing.one_list,
        calls=(("<TOOLCALL>", "</TOOLCALL>"),),
        body=Json(),
        ends=("<SPECIAL_12>",),
    ),
    Format(
        "minimax_m1",
        aliases=("minimax-m1",),
        writer=writing.object_lines,
        calls=(("<tool_calls>", "</tool_calls>"),),
        body=Json(lines=True),
        ends=("<end_of_sentence>",),
    ),
    Format(
        "functionary",
        aliases=("functionary_v3.1",),
        writer=writing.after_name_tag,
        calls=(("<function=", "</function>"),),
        body=Json(objects=False, header=r"(?P<name>[^\s<>{]++)>"),
        ends=("<|eom_id|>", "<|eot_id|>"),
    ),
    Format(
        "functionary_v3.2",
        writer=writing.after_line,
        calls=((">>>", ""),),
        body=Json(objects=False, header=r"(?P<name>[\w.\-]++)\n"),
        reasoning=(),
        ends=("<|eot_id|>", "<|eom_id|>"),
        prompt_end=(">>>", "all\n"),
        sign=">>>all",
    ),
)
