"""Texts for fuzzing the parsers: each format's markers, bits of calls, and a tool with arguments of every type."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from chat_tools.known_formats.grammar import Channels, Elements, Format, Json, Pythonic, Tagged
from chat_tools.parsing.formats import FORMATS
from chat_tools.parsing.parser import StreamParser, parse

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "ratio": {"type": ["number", "null"]},
                    "flag": {"type": "boolean"},
                    "items": {"type": "array", "items": {"anyOf": [{"type": "integer"}, {"type": "string"}]}},
                    "options": {"type": "object", "properties": {"mode": {"enum": ["a", "b", 3]}}},
                },
                "required": ["text"],
            },
        },
    }
]

_COMMON = [
    "f",
    "text",
    "1",
    "null",
    '"a"',
    "[1, 'a']",
    '{"mode": "a"}',
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    "\n",
    " ",
    "<",
    ">",
    ",",
]


def _fragments(fmt: Format) -> list[str]:
    body = fmt.body
    parts = [*fmt.ends, *(fmt.section or ())]
    parts += [mark for pair in (*fmt.reasoning, *fmt.calls) for mark in pair if mark]
    if isinstance(body, Tagged):
        opens, (key, value) = fmt.calls[0][0], (body.key, body.value)
        argument = f"{key[0]}text{key[1]}{value[0]}x{value[1]}"
        parts += [f"{opens}f{body.name_end}", f"{key[0]}count{key[1]}", *filter(None, [*key, *value, body.name_end])]
        parts += [argument, f"{opens}f{body.name_end}{argument}{fmt.calls[0][1]}"]
    elif isinstance(body, Elements):
        opens, tag = fmt.calls[0][0], f"{body.prefix}<"
        parts += [
            f"{opens}f{body.name_end}",
            f"{tag}text>",
            f"{tag}/text>",
            f"{tag}{body.item}>",
            f"{tag}/{body.item}>",
        ]
        parts += [body.prefix, body.name_end, f"{tag}items>1{tag}/items>", fmt.example]
    elif isinstance(body, Channels):
        parts += [body.start, body.channel, body.message, *body.ends, "assistant", " to=functions.f", body.reasoning]
        parts += [f'{body.channel}commentary to=functions.f{body.message}{{"text": "x"}}{body.ends[1]}']
    elif isinstance(body, Pythonic):
        parts += ["[f(", "f(text='x')", "=", ")", '"""', "'", "("]
    elif isinstance(body, Json):
        parts += ['{"name": "f", "arguments": {"text": "x"}}', '{"name": "', '"arguments": {', "```", *body.quotes]
        parts += _HEADERS.get(fmt.name, [])
        parts += [fmt.example] if fmt.writer else []
    return [*dict.fromkeys([*parts, *_COMMON])]


_HEADERS = {
    "mistral": ["f[ARGS]", "[CALL_ID]x", 'f{"text": "x"}'],
    "deepseek_v3": ["function<｜tool▁sep｜>f\n```json\n", "<｜tool▁sep｜>"],
    "deepseek_v3.1": ["f<｜tool▁sep｜>", '<｜tool▁sep｜>{"text": "x"}'],
    "kimi_k2": ["functions.f:0<|tool_call_argument_begin|>", "<|tool_call_argument_begin|>"],
    "gemma": ["call:f{", "call:", 'text:<|"|>x<|"|>'],
}

FRAGMENTS = {name: _fragments(fmt) for name, fmt in FORMATS.items()}


class Repeated(NamedTuple):
    """A text of any length: a unit over and over between a beginning and an end; NUL in it stands for a number."""

    begin: str
    unit: str
    end: str
    typed: bool = False  # parsed with TOOLS

    def of(self, size: int) -> str:
        """Return the text with about so many characters."""
        count = max((size - len(self.begin) - len(self.end)) // len(self.unit), 1)
        middle = "".join(map(self._numbered, range(count))) if "\0" in self.unit else self.unit * count
        return self.begin + middle[:size] + self.end

    def _numbered(self, index: int) -> str:
        return self.unit.replace("\0", str(index))


# The worst cases that benchmarks/adversarial.py found, now and before their cost was bounded.
_KNOWN_WORST: dict[str, list[Repeated]] = {
    "qwen3_xml": [
        Repeated("", "<function=f><parameter=text>x</parameter></function>", "</function>\n</tool_call>", True),
        Repeated("<tool_call>\n<function=f>\n<parameter=text>\n", "<tool_call>", "\n</parameter>\n</function>"),
        Repeated("", "1</think>", ""),
        Repeated("", "<tool_call>x", ""),
        Repeated("<tool_call>", "<function=f></function>x", ""),
    ],
    "hermes": [
        Repeated("", '<tool_call>{"}', "</tool_call>"),
        Repeated("", "{1,<f},<tool_call> [", "", True),
        Repeated("<tool_call>{'name': 'f', 'arguments': {'items': [", "'',1,", "1]}}</tool_call>", True),
        Repeated('<tool_call>{"name": "f", "arguments": {"items": [', "[[]],", "1]}}</tool_call>", True),
    ],
    "llama3_json": [
        Repeated("", "{1{,}{}\\</think>", ""),
        Repeated("", '<|python_tag|>{"mod": 1e99,1"a"}\0=', "", True),
        Repeated("", """{'a':1,"name": "f", "arguments": {"txt": "x"}}""", ""),
    ],
    "pythonic": [Repeated("[f(text='x', ", "x(),f(t='x')", "", True), Repeated("[", "f(t=''),", "]", True)],
    "mistral": [
        Repeated('[TOOL_CALLS]f{"text": ', "[TOOL_CALLS]<{'':1,},", "}"),
        Repeated("[TOOL_CALLS]f", "[TOOL_CALLS]<{{},},}", "}", True),
        Repeated("[TOOL_CALLS]f[CALL_ID]", " ", "[x"),
        Repeated("", "a</s>", ""),
    ],
    "deepseek_v3": [
        Repeated(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{'items': [",
            "'',1,",
            "1]}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            True,
        ),
        Repeated("", "</think><", ""),
    ],
    "deepseek_v3.1": [
        Repeated("", "1{</think>", ""),
        Repeated("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>f ", ""),
    ],
    "glm-4.5": [Repeated("", "<tool_call>f\n", ">", True)],
    "kimi_k2": [
        Repeated("<|tool_calls_section_begin|><|tool_call_begin|>functions.f", " :1", "x"),
        Repeated("", "}[EOS]>", "", True),
        Repeated("<|tool_calls_section_begin|>", "x<|tool_call_begin|>", ""),
        Repeated("<think>\n", "\\</think>", ""),
    ],
    "minimax": [
        Repeated(
            '<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">x</parameter>\n<p',
            "</invoke>}",
            "ll>",
            True,
        ),
        Repeated("", "a[e~[", ""),
    ],
    "granite": [Repeated("<|tool_call|>[", '<tool_call>{"\0":1,"nam"}: ', "]", True)],
    "harmony": [
        Repeated("<|channel|>commentary to=functions.f<|message|>{", '"":1,', '"a": 1}<|call|>'),
        Repeated("", "<|start|><|channel|>", ""),
    ],
    "seed": [Repeated("<seed:tool_call>\n", "<function=f><parameter=tet>x</paamter ></function>", "", True)],
    "gemma": [
        Repeated("", "<|tool_call>call:f{'a':1,}", "<tool_call|>", True),
        Repeated("", "<channel|>call:f", ""),
        Repeated("", "<channel|>call:f{a:b c", "}"),
        Repeated("<|tool_call>call:f{items:[", '<|"|><|"|>,', "1]}<tool_call|>", True),
    ],
}


def _worst(fmt: Format) -> list[Repeated]:
    """Return the worst known texts of a format, and repetitions of its own calls and markers."""
    marks = [*(fmt.section or ()), *(mark for pair in fmt.calls for mark in pair if mark)]
    opening = fmt.section[0] if fmt.section else ""
    usual = [Repeated(opening, fmt.example, "", True), *(Repeated(opening, f"{mark}x", "") for mark in marks)]
    return _KNOWN_WORST.get(fmt.name) or usual


WORST = {name: _worst(fmt) for name, fmt in FORMATS.items()}
SEARCHED = [name for name in FORMATS if name in _KNOWN_WORST]
"""Formats, at least one of each grammar, that the search of benchmarks/adversarial.py went through."""


def check_bytes(data: bytes) -> None:
    """Parse the bytes' text in one of the formats, whole and cut; raise AssertionError if a character is lost."""
    if len(data) < 3:
        return
    name = list(FORMATS)[data[0] % len(FORMATS)]
    fragments = FRAGMENTS[name]
    words = [fragments[b - 128] if 128 <= b < 128 + len(fragments) else chr(b) for b in data[2:]]
    text = "".join(words)
    whole = parse(text, name, TOOLS)
    assert "".join(text[s.start : s.end] for s in whole.segments) == text, "a character is lost"
    for call in whole.tool_calls:
        assert isinstance(json.loads(call.arguments), dict), "arguments are not valid JSON"
    parser = StreamParser(name, TOOLS)
    step = data[1] % 16 + 1
    for start in range(0, len(text), step):
        parser.feed(text[start : start + step])
    assert parser.finish() == whole, "the stream differs from the whole"
