"""A format's usual spelling of a call's beginning, compiled for the preview of calls that are not complete."""

from __future__ import annotations

import re
from typing import NamedTuple

from chat_tools.known_formats.grammar import Channels, Elements, Format, Json, Pythonic, Tagged
from chat_tools.parsing.cursor import Marks


class Spelling(NamedTuple):
    """The spelling of arguments in brackets: `opening`, then `key` and a value, with commas between.

    Values are `is_json`, or else literals. `quotes` are the delimiters of strings, a longer one before what it begins
    with; between those that are `raw` there are no escapes.
    """

    opening: str
    key: re.Pattern[str]
    quotes: tuple[str, ...]
    is_json: bool = False
    raw: tuple[str, ...] = ()
    bare_keys: bool = False

    @property
    def longest_quote(self) -> int:
        """Characters of the longest quote."""
        return max(map(len, self.quotes))


class CallHeader(NamedTuple):
    """The beginning of a call up to its name and what makes it certain, with groups `name` and perhaps `id`.

    `arguments` is what stands between it and the opening bracket, if anything does. One that is not `sure` and in which
    no `mark` stands is a call only with arguments, or by the name of a declared tool. `spelling` is None for tags.
    """

    pattern: re.Pattern[str]
    spelling: Spelling | None = None
    arguments: re.Pattern[str] | None = None
    sure: bool = True

    def identifier(self, match: re.Match[str]) -> str | None:
        """Return the call's id, if it has one; in a header, white space may surround it."""
        if "id" not in self.pattern.groupindex:
            return None
        text: str = match["id"] or ""
        return (text if self.arguments is not None else text.strip()) or None


_JSON = Spelling("{", re.compile(r'"(?P<key>[^"\\\x00-\x1f\ud800-\udfff]*+)"\s*+:\s*+(?=\S)'), ('"', "'"), is_json=True)
_PYTHON = Spelling("(", re.compile(r"(?P<key>[A-Za-z_]\w*+)\s*+=\s*+(?=\S)"), ('"""', "'''", '"', "'"))
_ARGUMENTS = re.compile(r'\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)')
_CALL = r"(?P<name>[A-Za-z_][\w.\-]{0,250}+)\s*+(?=\()"
_AFTER_CALL = r"[\s,;]*+"  # what may stand before a further call of a list
_OBJECT = (
    r'\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?+'
    r'(?:"(?:tool_call_)?+id"\s*+:\s*+"(?P<id>[^"\\\x00-\x1f]*+)"\s*+,\s*+)?+'
    r'(?:"function"\s*+:\s*+\{\s*+)?+'
    r'"(?:tool_)?+name"\s*+:\s*+"(?P<name>[^"\\\x00-\x1f]++)"\s*+,'
)
_KEYED_OBJECT = r'\{\s*+"(?P<name>[^"\\\x00-\x1f]++)"\s*+:\s*+(?=\{)'


class PreviewTables:
    """The compiled usual spelling of a call's beginning in one format.

    `heads` are the ways in which a call begins, `further` those of one behind another in a list.
    """

    def __init__(self, fmt: Format) -> None:
        body = fmt.body
        self.heads: list[CallHeader] = []
        self.further: list[CallHeader] = []
        self.tagged = body if isinstance(body, Tagged) else Tagged("", ("", ""), ("", ""))
        self.prefix = body.prefix if isinstance(body, Elements) else ""
        to = fmt.recipients
        header = rf"{re.escape(to.mark.strip())}[\w.\-]*+{re.escape(to.message)}" if to is not None else ""
        section = rf"(?P<section>{header}{re.escape(fmt.section[0])}\s*+)?+" if fmt.section else ""
        opens = "|".join(re.escape(mark) for mark, _ in fmt.calls)
        marked = rf"{section}(?P<mark>{opens})" if opens else section
        if isinstance(body, Tagged):
            self._tags(body, fmt, marked)
        elif isinstance(body, Elements):
            self._head(rf"{marked}(?P<name>[^\s<>\"'=]++){re.escape(body.name_end)}", None)
            self.key = re.compile(rf"\s*+{re.escape(body.prefix)}<(?P<key>[^\s<>\"'=/]++)>")
            self.value = re.compile("")
            self.marks = Marks.of([body.prefix])
        elif isinstance(body, Channels):
            name = rf"(?:(?!{re.escape(body.message)}).)*?{body.recipient}(?:(?!{re.escape(body.message)}).)*?"
            begin = rf"(?:{re.escape(body.start)}|{re.escape(body.channel)})"
            pattern = re.compile(rf"{begin}{name}{re.escape(body.message)}\s*+(?=\{{)", re.DOTALL)
            self.heads.append(CallHeader(pattern, _JSON))
        else:
            # A call that needs no marker where an answer begins may stand behind another one and a semicolon.
            bare = f"(?:{marked or '(?P<mark>(?!))'}|(?:;\\s*+)?+)"
            self._brackets(body, bare if fmt.opening else marked, sure=not fmt.opening)

    def _head(self, pattern: str, spelling: Spelling | None) -> None:
        self.heads.append(CallHeader(re.compile(rf"\s*+{pattern}"), spelling))

    def _tags(self, body: Tagged, fmt: Format, marked: str) -> None:
        end = re.escape(body.name_end)
        if body.name_end == "\n":  # the first argument may follow at once
            end = rf"[ \t]*+(?:\n|(?={re.escape(body.key[0])}))"
        if fmt.calls[0][0].endswith('"') and '"' not in body.name_end:
            end = rf'"[^<>\n]*+{end}'
        self._head(rf"{marked}(?P<name>[^\s<>\"'=]++){end}", None)
        said = rf'"\s++{body.attribute}="(?P<text>{"|".join(body.kinds)})"' if body.attribute else ""
        key = rf"(?P<key>[^\s<>\"'=]++){said}{re.escape(body.key[1])}"
        self.key = re.compile(rf"\s*+{re.escape(body.key[0])}{key}")
        self.value = re.compile(rf"\s*+{re.escape(body.value[0])}" if body.value[0] else "")
        marks = {body.key[0], body.value[1], *(m for pair in fmt.calls for m in pair if m), *(fmt.section or ())}
        self.marks = Marks.of(marks)
        self.kept_end = Marks.of([body.raw[1] + body.value[1]])
        self.follow = (body.key[0], *(close for _, close in fmt.calls))

    def _brackets(self, body: Json | Pythonic, marked: str, sure: bool) -> None:
        if isinstance(body, Pythonic):
            bracket = r"\[" if body.brackets else r"\[?+"
            self._head(rf"{marked}\s*+{bracket}{_AFTER_CALL}{_CALL}", _PYTHON)
            self.further.append(CallHeader(re.compile(_AFTER_CALL + _CALL), _PYTHON))
            return
        if body.header:
            key = re.compile(r"(?P<key>[A-Za-z_][\w.\-]*+)\s*+:\s*+(?=\S)")
            quotes = (*body.quotes, '"', "'")
            bare = Spelling("{", key, quotes, raw=body.quotes, bare_keys=True)
            self._head(rf"{marked}\s*+{body.header}\s*+(?=\{{)", bare if body.quotes else _JSON)
        if body.objects:
            one, between = (_KEYED_OBJECT, None) if body.keyed else (_OBJECT, _ARGUMENTS)
            first = re.compile(rf"\s*+{marked}\s*+{re.escape(body.lead)}\[?+\s*+{one}")
            self.heads.append(CallHeader(first, _JSON, between, sure))
            self.further.append(CallHeader(re.compile(_AFTER_CALL + one), _JSON, between))
