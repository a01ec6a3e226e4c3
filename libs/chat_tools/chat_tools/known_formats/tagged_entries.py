"""Formats whose calls are tags: the variants of DeepSeek's markup language, of GLM's keys and values, and others."""

from __future__ import annotations

from chat_tools.known_formats import writing
from chat_tools.known_formats.grammar import Format, Pair, Tagged

CHATML = ("<|im_end|>", "<|endoftext|>")


def markup_language(
    name: str,
    wrapper: str,
    aliases: tuple[str, ...] = (),
    mark: str = "｜DSML｜",
    ends: tuple[str, ...] = ("<｜end▁of▁sentence｜>",),
) -> Format:
    """Return a format of DeepSeek's markup language: one attribute of its tags says whether a value is text.

    A tag that closes itself is a call without arguments. `mark` stands in each tag.
    """
    return Format(
        name,
        aliases=aliases,
        writer=writing.tagged,
        section=(f"<{mark}{wrapper}>", f"</{mark}{wrapper}>"),
        calls=((f'<{mark}invoke name="', f"</{mark}invoke>"),),
        body=Tagged(
            name_end='">',
            key=(f'<{mark}parameter name="', ">"),
            value=("", f"</{mark}parameter>"),
            attribute="string",
            short='"/>',
        ),
        ends=ends,
        bare=True,
        call_ends_reasoning=True,
    )


def keys_and_values(
    name: str,
    ends: tuple[str, ...],
    call: str = "tool_call",
    section: str = "",
    name_end: str = "\n",
    suffix: str = "",
    reasoning: tuple[Pair, ...] = (("<think>", "</think>"),),
    guess: bool = False,
    aliases: tuple[str, ...] = (),
    dense: bool = False,
) -> Format:
    """Return a format of GLM's kind: a call's name, then the tags of a key and of a value for each argument.

    `section` and `call` name the tags of the wrapper and of a call, with what all tags begin with (`ifm|tool_call`);
    `suffix` stands in each tag before its end. A `dense` one is written without white space.
    """
    prefix = call.removesuffix("tool_call") if call.endswith("|tool_call") else ""

    def tags(word: str) -> Pair:
        return f"<{word}{suffix}>", f"</{word}{suffix}>"

    return Format(
        name,
        aliases=aliases,
        writer=writing.without_space if dense else writing.tagged,
        section=tags(section) if section else None,
        calls=(tags(call),),
        body=Tagged(name_end, key=tags(f"{prefix}arg_key"), value=tags(f"{prefix}arg_value"), guess=guess),
        reasoning=reasoning,
        ends=ends,
        bare=bool(section),
        call_ends_reasoning=True,
    )


def hunyuan_3(suffix: str = "") -> Format:
    """Return the format of Hunyuan 3; `suffix` is what a checkpoint's tags end with (`:opensource`)."""
    tags = ((f"<think{suffix}>", f"</think{suffix}>"),)
    return keys_and_values(
        f"hy_v3{suffix}",
        (f"<｜hy_eos{suffix}｜>",),
        section="tool_calls",
        name_end=f"<tool_sep{suffix}>",
        suffix=suffix,
        reasoning=tags,
    )


def hunyuan_4(suffix: str = "") -> Format:
    """Return the format of Hunyuan 4, which has no separator after the name; `suffix` as for Hunyuan 3."""
    tags = ((f"<think{suffix}>", f"</think{suffix}>"),)
    return keys_and_values(
        f"hy_v4{suffix}", (f"<｜hy_eos{suffix}｜>",), section="tool_calls", suffix=suffix, reasoning=tags, dense=True
    )


WITH_SUFFIX = {"hy_v3": hunyuan_3, "hy_v4": hunyuan_4}
"""Formats of which each checkpoint may have tags of its own: `hy_v3:opensource`."""

TAGGED_ENTRIES = (
    markup_language("deepseek_v3.2", "function_calls", ("deepseekv32", "deepseek_v32")),
    markup_language("deepseek_v4", "tool_calls", ("deepseekv4",)),
    markup_language("deepseek_v4.1", "calls", ("deepseekv41", "deepseek_v41"), mark="｜DSML｜ "),
    markup_language("gigachat3.5", "tool_calls", ("gigachat35",), mark="｜GCML｜", ends=("</s>", "<|message_sep|>")),
    hunyuan_3(),
    hunyuan_4(),
    keys_and_values(
        "glm-4.7", ("<|user|>", "<|observation|>", "<|endoftext|>"), guess=True, aliases=("glm47",), dense=True
    ),
    keys_and_values("poolside_v1", ("</assistant>",), guess=True),
    keys_and_values("ling3", ("<|role_end|>",), guess=True),
    keys_and_values("spark2.5", ("<｜end▁of▁sentence｜>",), aliases=("spark25",), dense=True),
    keys_and_values("iquest_q1", (), call="iquest_tool_call", dense=True),
    keys_and_values(
        "k2_horizon",
        (),
        call="ifm|tool_call",
        section="ifm|tool_calls",
        reasoning=tuple((f"<ifm|{word}>", f"</ifm|{word}>") for word in ("think", "think_fast", "think_faster")),
    ),
    Format(
        "dots",
        writer=writing.tagged,
        section=("<dots_function_call>", "</dots_function_call>"),
        calls=(('<invoke name="', "</invoke>"),),
        body=Tagged(name_end='">', key=('<parameter name="', '">'), value=("", "</parameter>"), objects=True),
    ),
    Format(
        "minicpm5",
        writer=writing.tagged_in_one_line,
        calls=(('<function name="', "</function>"),),
        body=Tagged('">', key=('<param name="', '">'), value=("", "</param>"), guess=True, raw=("<![CDATA[", "]]>")),
        ends=CHATML,
    ),
    Format(
        "mimo",
        writer=writing.section_of_each,
        section=("<tool_call>", "</tool_call>"),
        calls=(("<function=", "</function>"),),
        body=Tagged(name_end=">", key=("<parameter=", ">"), value=("", "</parameter>")),
        ends=CHATML,
        bare=True,
        call_ends_reasoning=True,
    ),
)
