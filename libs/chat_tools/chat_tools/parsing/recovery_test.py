"""Each case of the corpus of malformed output (malformed.jsonl) by its name; and how the engine says what it did."""

import json
from pathlib import Path

import pytest

from chat_tools.parsing.parser import StreamParser, parse
from chat_tools.parsing.result import ParsedMessage

CASES = [json.loads(line) for line in (Path(__file__).parent / "malformed.jsonl").read_text().splitlines()]


def tool(name: str, **properties: object) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


TOOLS = [
    tool("add", a={"type": "integer"}, b={"type": "integer"}),
    tool("write", text={"type": "string"}),
    tool("note", tag={"anyOf": [{"type": "string"}, {"type": "null"}]}),
    tool("many", items={"type": "array"}),
    tool("flag", on={"type": "boolean"}),
    tool("ratio", x={"type": "number"}),
    tool("deep", o={"type": "object"}),
    tool("ping"),
]


@pytest.mark.parametrize("case", CASES, ids=[f"{c['format']}: {c['case']}" for c in CASES])
def test_malformed_output(case):
    message = parse(case["text"], case["format"], TOOLS)
    assert [[c.name, json.loads(c.arguments)] for c in message.tool_calls] == case["calls"]
    assert len(message.malformed) == case["malformed"]
    assert message.content == case.get("content", message.content)
    assert message.reasoning == case.get("reasoning", message.reasoning)
    assert "".join(case["text"][s.start : s.end] for s in message.segments) == case["text"]


def only(text: str, name: str = "qwen3_xml") -> ParsedMessage:
    return parse(text, name, TOOLS)


def call(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def diagnostics(arguments: str, name: str = "add") -> tuple[str, ...]:
    return only(call(f"<function={name}>\n{arguments}</function>")).tool_calls[0].diagnostics


def value(key: str, text: str) -> str:
    return f"<parameter={key}>\n{text}\n</parameter>\n"


def test_every_liberty_is_said():
    assert diagnostics(value("a", "1")) == ()
    assert diagnostics(value("a", "2") + value("a", "1")) == ("duplicate key 'a': the last one counts",)
    assert diagnostics(value("z", "1")) == ("unknown argument 'z'",)
    assert diagnostics("", "zzz") == ("unknown tool 'zzz'",)
    assert diagnostics(value("a", "x")) == ("a: 'x' is not integer; kept as text",)
    assert diagnostics("<parameter=a>\n1\n") == ("an argument's closing tag is missing",)
    assert diagnostics("hm\n" + value("a", "1")) == ("text between the arguments was left out",)


def test_every_malformed_span_has_its_reason():
    broken = call("<function=>\n</function>")
    message = only(f"A {broken} B")
    (bad,) = message.malformed
    assert message.text[slice(*bad.span)] == broken
    assert bad.reason == "the tool's name is empty"


def test_split_utf8():
    text = "Grüße 🌍 " + call("<function=write>\n" + value("text", "✓ añb") + "</function>")
    raw = text.encode()
    for cut in range(len(raw) + 1):
        parser = StreamParser("qwen3_xml", TOOLS)
        parser.feed(raw[:cut])
        parser.feed(raw[cut:])
        assert parser.finish() == parse(text, "qwen3_xml", TOOLS)
    assert parse(raw[: raw.index("✓".encode()) + 1], "qwen3_xml").text.endswith("\ufffd")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "write", "arguments": {"text": "a\\"}, \\\\"}}</tool_call>'),
        ("hermes", "<tool_call>{'name': 'write', 'arguments': {'text': 'a\\'}, \\\\'}}</tool_call>"),
        ("pythonic", "[write(text='a\\')], b(\\\\')]"),
        ("gemma", '<|tool_call>call:write{text:<|"|>a"}\\<|"|>}<tool_call|>'),
    ],
)
def test_escapes_and_quotes_cut_anywhere(name, text):
    whole = parse(text, name, TOOLS)
    assert len(whole.tool_calls) == 1
    assert not whole.malformed
    for cut in range(len(text) + 1):
        parser = StreamParser(name, TOOLS)
        parser.feed(text[:cut])
        parser.feed(text[cut:])
        assert parser.finish() == whole


def test_the_stream_keeps_pace():
    """Text is reported at once unless it may be the beginning of a marker; a call when its last character is there."""
    parser = StreamParser("hermes")
    seen = [parser.feed(c) for c in 'Hi <b>\n<tool_call>{"name": "add", "arguments": {}}</tool_call>']
    assert all(seen[:3])  # H, i, space
    assert not seen[3]  # "<" may begin a marker
    assert seen[4]  # "<b" does not
    assert [bool(s) for s in seen[-13:-11]] == [True, False]
    assert [type(e).__name__ for s in seen[7:] for e in s] == ["CallFinished"]


HUGE = {
    "a literal of too many values": '{"name": "f", "arguments": {"a": [True' + ",1" * 200_000 + "]}}",
    "an object that does not end": '{"name": "f", "arguments": {"a": [1' + ",1" * 400_000,
    "a string that does not end": '{"name": "f", "arguments": {"a": "' + "x" * 900_000,
    "brackets that do not match": '{"name": "f", "arguments": {"a": [1' + ",[1]" * 200_000 + "}",
}


@pytest.mark.parametrize("what", HUGE)
def test_one_huge_bad_call_takes_no_good_one_with_it(what):
    good = '<tool_call>\n{"name": "g", "arguments": {"a": 1}}\n</tool_call>'
    message = parse(f"<tool_call>\n{HUGE[what]}\n</tool_call>\n{good}", "hermes")
    assert [call.name for call in message.tool_calls] == ["g"]
    assert len(message.malformed) == 1
