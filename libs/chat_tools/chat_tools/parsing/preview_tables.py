"""A format's usual spelling of a call's beginning, compiled for the preview of calls that are not complete."""

from __future__ import annotations

import re

from chat_tools.parsing.cursor import Marks
from chat_tools.parsing.grammar import Channels, Elements, Format, Json, Tagged


class PreviewTables:
    """What a format's usual spelling of a call's beginning compiles to; `head` is None where none is followed."""

    def __init__(self, fmt: Format) -> None:
        self.fmt = fmt
        body = fmt.body
        section = rf"(?P<section>{re.escape(fmt.section[0])}\s*+)?+" if fmt.section else ""
        opens = "|".join(re.escape(mark) for mark, _ in fmt.calls)
        self.head: re.Pattern[str] | None = None
        self.arguments: re.Pattern[str] | None = None  # between the name and the object of arguments
        self.tagged = body if isinstance(body, Tagged) else Tagged("", ("", ""), ("", ""))
        self.prefix = body.prefix if isinstance(body, Elements) else ""
        section += rf"(?P<mark>{opens})" if opens else ""
        if isinstance(body, Tagged):
            end = r"[ \t]*+\n" if body.name_end == "\n" else re.escape(body.name_end)
            if fmt.calls[0][0].endswith('"') and '"' not in body.name_end:
                end = rf'"[^<>\n]*+{end}'
            self.head = re.compile(rf"\s*+{section}(?P<name>[^\s<>\"'=]++){end}")
            said = rf'"\s++{body.attribute}="(?P<text>{"|".join(body.kinds)})"' if body.attribute else ""
            key = rf"(?P<key>[^\s<>\"'=]++){said}{re.escape(body.key[1])}"
            self.key = re.compile(rf"\s*+{re.escape(body.key[0])}{key}")
            self.value = re.compile(rf"\s*+{re.escape(body.value[0])}" if body.value[0] else "")
            marks = {body.key[0], body.value[1], *(m for pair in fmt.calls for m in pair if m), *(fmt.section or ())}
            self.marks = Marks.of(marks)
            self.follow = (body.key[0], *(close for _, close in fmt.calls))
        elif isinstance(body, Elements):
            self.head = re.compile(rf"\s*+{section}(?P<name>[^\s<>\"'=]++){re.escape(body.name_end)}")
            self.key = re.compile(rf"\s*+{re.escape(body.prefix)}<(?P<key>[^\s<>\"'=/]++)>")
            self.value = re.compile("")
            self.marks = Marks.of([body.prefix])
        elif isinstance(body, Json) and not body.quotes and body.header:
            self.head = re.compile(rf"\s*+{section}\s*+{body.header}\s*+(?=\{{)")
        elif isinstance(body, Json) and not body.quotes:
            begin = rf"\s*+{re.escape(body.lead)}\[?+\s*+\{{\s*+"
            section = f"(?:{section})?+" if section else "(?P<mark>)"
            if body.keyed:
                self.head = re.compile(rf'\s*+{section}{begin}"(?P<name>[^"\\\x00-\x1f]++)"\s*+:\s*+(?=\{{)')
                return
            begin += r'(?:"type"\s*+:\s*+"function"\s*+,\s*+)?+'
            begin += r'(?:"(?:tool_call_)?+id"\s*+:\s*+"(?P<id>[^"\\\x00-\x1f]*+)"\s*+,\s*+)?+'
            self.head = re.compile(rf'\s*+{section}{begin}"(?:tool_)?+name"\s*+:\s*+"(?P<name>[^"\\\x00-\x1f]++)"\s*+,')
            self.arguments = re.compile(r'\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)')
        elif isinstance(body, Channels):
            name = rf"(?:(?!{re.escape(body.message)}).)*?{body.recipient}(?:(?!{re.escape(body.message)}).)*?"
            begin = rf"(?:{re.escape(body.start)}|{re.escape(body.channel)})"
            self.head = re.compile(rf"{begin}{name}{re.escape(body.message)}\s*+(?=\{{)", re.DOTALL)
