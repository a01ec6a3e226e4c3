"""Tool-call formats as data: markers, nesting and the codec of the arguments. One engine reads them all."""

from __future__ import annotations

from dataclasses import dataclass

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Tagged:
    """Arguments as tagged values: NAME `name_end`, then `key[0]` KEY `key[1]` `value[0]` VALUE `value[1]` repeated.

    With `newlines`, one newline after the opening and one before the closing tag of a value belong to the tags.
    """

    name_end: str
    key: Pair
    value: Pair
    newlines: bool = False


@dataclass(frozen=True, slots=True)
class Format:
    """A format: blocks of reasoning, an optional `section` around calls, and the call's own markers and body."""

    name: str
    call: Pair
    body: Tagged
    section: Pair | None = None
    reasoning: tuple[Pair, ...] = (("<think>", "</think>"),)
    ends: tuple[str, ...] = ()
    bare: bool = False


_CHATML_ENDS = ("<|im_end|>", "<|endoftext|>")

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format(
            "qwen3_xml",
            section=("<tool_call>", "</tool_call>"),
            call=("<function=", "</function>"),
            body=Tagged(name_end=">", key=("<parameter=", ">"), value=("", "</parameter>"), newlines=True),
            ends=_CHATML_ENDS,
            bare=True,
        ),
    )
}


ALIASES = {"qwen3_5": "qwen3_xml", "qwen3_coder": "qwen3_xml"}


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
