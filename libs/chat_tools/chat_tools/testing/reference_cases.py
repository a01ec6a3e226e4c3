"""Turns that parsers are compared on: our examples and malformed ones, texts of vLLM's tests, llama.cpp's cases."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from chat_tools import Format, find_format, parse
from chat_tools.known_formats.servers import NAMES, REFUSED
from chat_tools.rendering.format_detection import detect_format
from chat_tools.testing.tokenizer import tiny_tokenizer

Calls = list[tuple[str, Any]]
TWO = (("weather", {"city": "Paris", "days": 3}), ("add", {"a": 1, "text": "x < y & z"}))


class Case(NamedTuple):
    """A turn for a source: the source's name of its parser, the text, the tools, and the calls that are expected."""

    source: str
    name: str
    text: str
    tools: list[dict[str, Any]]
    expected: Calls | None = None


def format_of(source: str, name: str) -> Format:
    """Return the format of a source's parser name."""
    return find_format(name if source == "llama.cpp" else f"{source}:{name}")


def server_cases(source: str, sources: Path, malformed: Path, malformed_tools: list[dict[str, Any]]) -> Iterator[Case]:
    """Yield the cases of a server: for each of its names, our examples, our malformed turns, and its own tests'.

    `malformed` is the file of malformed turns, `malformed_tools` are the tools of their calls.
    """
    rows = [json.loads(line) for line in malformed.read_text().splitlines()]
    wanted = {row["text"]: [(name, arguments) for name, arguments in row["calls"]] for row in rows}
    for name in NAMES[source]:
        if name in REFUSED:
            continue
        fmt = format_of(source, name)
        texts = [fmt.example, fmt.write(TWO), *(row["text"] for row in rows if row["format"] == fmt.name)]
        if source == "vllm":
            texts += _test_texts(sources / "tests", name, fmt)
        for text in dict.fromkeys(texts):
            tools = malformed_tools if text in wanted else tools_for(fmt, text)
            yield Case(source, name, text, tools, wanted.get(text))


def tools_for(fmt: Format, text: str) -> list[dict[str, Any]]:
    """Return tools with the types of the arguments that we read, so that no source drops a call as unknown."""
    types: dict[str, dict[str, Any]] = {"weather": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    for call in parse(text, fmt).tool_calls:
        fields = types.setdefault(call.name, {})
        fields.update({key: {"type": _type_of(value)} for key, value in call.arguments_dict().items()})
    return [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": fields}}}
        for name, fields in types.items()
    ]


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "string")


def _test_texts(tests: Path, name: str, fmt: Format) -> list[str]:
    """Return the texts in a parser's tests that hold a marker of its calls."""
    marks = [mark for mark, _ in fmt.calls if mark] or [fmt.opening]
    word = re.sub(r"[^a-z0-9]", "", name)
    files = [path for path in tests.rglob("test_*.py") if word in re.sub(r"[^a-z0-9]", "", path.stem)]
    texts = []
    for path in sorted(files):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 20_000:
                texts += [node.value] if any(mark in node.value for mark in marks) and len(node.value) > 30 else []
    return texts


_STRING = re.compile(r'R"([^()\\\s]{0,16})\((.*?)\)\1"|"((?:[^"\\]|\\.)*)"', re.DOTALL)
_TOOL = re.compile(r"static common_chat_tool (\w+)\s*\{(.*?)\n\};", re.DOTALL)
_MESSAGE = re.compile(r"const common_chat_msg (\w+)\s*=\s*simple_assist_msg\((.*?)\);", re.DOTALL)


def llama_cases(sources: Path) -> Iterator[Case]:
    """Yield the cases of llama.cpp's `test-chat.cpp` that say which calls a whole turn holds."""
    (file,) = sources.rglob("test-chat.cpp")
    source = file.read_text(encoding="utf-8")
    tools = {m[1]: strings for m in _TOOL.finditer(source) if len(strings := _strings(m[2])) >= 3}
    messages = {m[1]: _call_of(_strings(m[2])) for m in _MESSAGE.finditer(source)}
    parts = re.split(r'peg_tester\("([^"]+)"', source)
    for template, part in zip(parts[1::2], parts[2::2], strict=True):
        name = _format_name(next(sources.rglob(Path(template).name), None))
        for chain in re.findall(r"\.test\((.*?)\.run\(\)", part, re.DOTALL) if name else ():
            case = _case(chain, name, tools, messages)
            if case is not None:
                yield case


def _format_name(template: Path | None) -> str:
    if template is None:
        return ""
    try:
        return detect_format(tiny_tokenizer("chatml", template=template.read_text(encoding="utf-8")))
    except ValueError:
        return ""


def _case(chain: str, name: str, tools: dict[str, list[str]], messages: dict[str, Calls]) -> Case | None:
    """Return a case of one chain, None where it is of a part of a turn, of an error, or says nothing of calls."""
    before = re.split(r"\n\s*\.|\)\s*\.(?=[a-z_]+\()", chain)[0]
    if re.search(r"\w", _STRING.sub("", before)):
        return None  # an expression, not literals alone
    text = "".join(_strings(before))
    expected: Calls | None = None
    if listed := re.search(r"\.expect_tool_calls\(\{(.*)\}\s*\)", chain, re.DOTALL):
        strings, count = _strings(listed[1]), len(re.findall(r"\{\s*TEXT", _STRING.sub("TEXT", listed[1])))
        step = len(strings) // max(1, count)  # a name, arguments, and perhaps an id
        if step in (2, 3) and len(strings) == step * count:
            expected = [(strings[i], _json(strings[i + 1])) for i in range(0, len(strings), step)]
    elif named := re.search(r"\.expect\((\w+)\)", chain):
        expected = messages.get(named[1])
    if (
        expected is None
        or "is_partial(true)" in chain
        or "json_schema(" in chain
        or "_throws" in chain
        or "prefill" in chain
    ):
        return None
    given = re.search(r"\.tools\(\{(.*?)\}\)", chain, re.DOTALL)
    names = re.findall(r"\w+", given[1]) if given else []
    if expected and not all(tool in tools for tool in names):
        return None
    return Case("llama.cpp", name, text, [_schema(tools[tool]) for tool in names if tool in tools], expected)


def _schema(strings: list[str]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": strings[0], "parameters": _json(strings[-1])}}


def _call_of(strings: list[str]) -> Calls:
    """Return the calls of a message: content, reasoning, a tool's name and its arguments."""
    return [(strings[2], _json(strings[3]))] if len(strings) >= 4 else []


def _strings(source: str) -> list[str]:
    """Return the string literals of C++ text; neighbours without a comma are one."""
    literals: list[str] = []
    end = None
    for match in _STRING.finditer(source):
        value = match[2] if match[2] is not None else json.loads(f'"{_plain(match[3])}"', strict=False)
        if end is not None and not source[end : match.start()].strip():
            literals[-1] += value
        else:
            literals.append(value)
        end = match.end()
    return literals


def _plain(escaped: str) -> str:
    return re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", escaped).replace("\\'", "'").replace("\\?", "?")


def _json(text: str) -> Any:
    try:
        return json.loads(text or "{}")
    except ValueError:
        return text
