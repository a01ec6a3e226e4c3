"""Each case of the corpus of malformed output (malformed.jsonl) by its name; and how the engine says what it did."""

import json
from pathlib import Path
from typing import Any

import pytest

from chat_tools.parsing.parser import StreamParser, parse
from chat_tools.parsing.result import ParsedMessage
from chat_tools.testing.samples import MALFORMED_TOOLS as TOOLS

CASES = [json.loads(line) for line in (Path(__file__).parent / "malformed.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("case", CASES, ids=[f"{c['format']}: {c['case']}" for c in CASES])
def test_malformed_output(case: dict[str, Any]) -> None:
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


def test_every_liberty_is_said() -> None:
    assert diagnostics(value("a", "1")) == ()
    assert diagnostics(value("a", "2") + value("a", "1")) == ("duplicate key 'a': the last one counts",)
    assert diagnostics(value("z", "1")) == ("unknown argument 'z'",)
    assert diagnostics("", "zzz") == ("unknown tool 'zzz'",)
    assert diagnostics(value("a", "x")) == ("a: 'x' is not integer; kept as text",)
    assert diagnostics("<parameter=a>\n1\n") == ("an argument's closing tag is missing",)
    assert diagnostics("hm\n" + value("a", "1")) == ("text between the arguments was left out",)


def test_every_malformed_span_has_its_reason() -> None:
    broken = call("<function=>\n</function>")
    message = only(f"A {broken} B")
    (bad,) = message.malformed
    assert message.text[slice(*bad.span)] == broken
    assert bad.reason == "the tool's name is empty"


def test_split_utf8() -> None:
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
def test_escapes_and_quotes_cut_anywhere(name: str, text: str) -> None:
    whole = parse(text, name, TOOLS)
    assert len(whole.tool_calls) == 1
    assert not whole.malformed
    for cut in range(len(text) + 1):
        parser = StreamParser(name, TOOLS)
        parser.feed(text[:cut])
        parser.feed(text[cut:])
        assert parser.finish() == whole


def test_the_stream_keeps_pace() -> None:
    """Text is reported at once unless it may be the beginning of a marker; a call when its last character is there."""
    parser = StreamParser("hermes", prefill="")
    seen = [parser.feed(c) for c in 'Hi <b>\n<tool_call>{"name": "add", "arguments": {}}</tool_call>']
    assert all(seen[:3])  # H, i, space
    assert not seen[3]  # "<" may begin a marker
    assert seen[4]  # "<b" does not
    assert [bool(s) for s in seen[-13:-11]] == [True, False]
    assert [type(e).__name__ for s in seen[7:] for e in s] == ["CallStarted", "ArgumentsDelta", "CallFinished"]


HUGE = {
    "a literal of too many values": '{"name": "f", "arguments": {"a": [True' + ",1" * 200_000 + "]}}",
    "an object that does not end": '{"name": "f", "arguments": {"a": [1' + ",1" * 400_000,
    "a string that does not end": '{"name": "f", "arguments": {"a": "' + "x" * 900_000,
    "brackets that do not match": '{"name": "f", "arguments": {"a": [1' + ",[1]" * 200_000 + "}",
}


@pytest.mark.parametrize("what", HUGE)
def test_one_huge_bad_call_takes_no_good_one_with_it(what: str) -> None:
    good = '<tool_call>\n{"name": "g", "arguments": {"a": 1}}\n</tool_call>'
    message = parse(f"<tool_call>\n{HUGE[what]}\n</tool_call>\n{good}", "hermes")
    assert [call.name for call in message.tool_calls] == ["g"]
    assert len(message.malformed) == 1


A = {"a": 1}
# What is between is no call; the good call after it is read, and the noise is malformed.
NOISE = {
    "qwen3_xml": ("<tool_call>{}<function=add>\n<parameter=a>\n1\n</parameter>\n</function>{}</tool_call>", "hm "),
    "minimax": (
        '<minimax:tool_call>{}<invoke name="add"><parameter name="a">1</parameter></invoke>{}</minimax:tool_call>',
        "hm ",
    ),
    "seed": ("<seed:tool_call>{}<function=add><parameter=a>1</parameter></function>{}</seed:tool_call>", "hm "),
    "kimi_k2": (
        (
            '<|tool_calls_section_begin|>{}<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{{"a": 1}}'
            "<|tool_call_end|>{}<|tool_calls_section_end|>"
        ),
        "noise",
    ),
    "deepseek_v3.1": (
        (
            '<｜tool▁calls▁begin｜>{}<｜tool▁call▁begin｜>add<｜tool▁sep｜>{{"a": 1}}'
            "<｜tool▁call▁end｜>{}<｜tool▁calls▁end｜>"
        ),
        "noise",
    ),
    "deepseek_v3": (
        (
            '<｜tool▁calls▁begin｜>{}<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{{"a": 1}}\n```'
            "<｜tool▁call▁end｜>{}<｜tool▁calls▁end｜>"
        ),
        "noise",
    ),
}


@pytest.mark.parametrize("name", NOISE)
@pytest.mark.parametrize("where", ["before", "after", "between", "lines"])
def test_noise_in_a_block_takes_no_call_with_it(name: str, where: str) -> None:
    block, noise = NOISE[name]
    opening, closing = block[: block.index("{}")], block[block.rindex("{}") + 2 :]
    call = block[len(opening) + 2 : block.rindex("{}")].replace("{{", "{").replace("}}", "}")
    text = {
        "before": opening + noise + call + closing,
        "after": opening + call + noise + closing,
        "between": opening + call + noise + call + closing,
        "lines": f"{opening}\n{noise}\nmore {noise}\n{call}\n{noise}\n{call}\n{closing}",
    }[where]
    message = only(f"Hi. {text} Bye.", name)
    count = 2 if where in ("between", "lines") else 1
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == [("add", A)] * count
    assert message.content == "Hi.  Bye."
    assert {m.reason for m in message.malformed} == {"text inside the block that is no call"}
    for cut in range(len(text)):
        parser = StreamParser(name, TOOLS)
        parser.feed(text[:cut])
        assert parser.finish(text[cut:]) == only(text, name)


def test_text_after_a_block_without_an_end_is_content() -> None:
    call = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n"
    message = only(f"{call}Done.\n<tool_call>\n<function=ping>\n</function>\n</tool_call>")
    assert [c.name for c in message.tool_calls] == ["add", "ping"]
    assert message.content == "Done."
    assert not message.malformed


@pytest.mark.parametrize(
    ("name", "text", "calls", "content"),
    [
        ("glm-4.5", "<tool_call>ratio\n<arg_key>x</arg_key>\n<arg_value>2</arg_value>\n", [["ratio", {"x": 2}]], ""),
        ("glm-4.5", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n", [], ""),
        ("glm-4.5", "<tool_call>add\n<arg_key>a</arg_key><arg_value>1</arg_value>\n<|observation|>", [["add", A]], ""),
        ("glm-4.5", "<tool_call>ratio\n<arg_key>x</arg_key>\n<arg_value>2</arg_value>\n<arg_k", [], ""),
        ("glm-4.5", "<tool_call>ratio\n<arg_key>x</arg_key>\n<arg_value>2</arg_value>\n<arg_key>y</arg", [], ""),
        ("qwen3_xml", "<tool_call>\n<function=ratio>\n<parameter=x>\n2\n</parameter>\n", [["ratio", {"x": 2}]], ""),
        ("qwen3_xml", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<|im_end|>", [["add", A]], ""),
        ("gemma", "<|tool_call>call:write{text:hello there}<tool_call|>", [["write", {"text": "hello there"}]], ""),
        (
            "gemma",
            "<|tool_call>call:many{items:[red, 2, true]}<tool_call|>",
            [["many", {"items": ["red", 2, True]}]],
            "",
        ),
        (
            "gemma",
            "<|tool_call>call:deep{o:{at:http://x/?q=1}}<tool_call|>",
            [["deep", {"o": {"at": "http://x/?q=1"}}]],
            "",
        ),
        ("gemma", "call:add{a:1}<tool_call|>", [["add", A]], ""),
        ("gemma", "call:add{a:1}", [["add", A]], ""),
        ("gemma", "call: me {later}", [], "call: me {later}"),
        (
            "llama3_json",
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}};{"name": "ping"}',
            [["add", A], ["ping", {}]],
            "",
        ),
        ("llama3_json", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; so', [["add", A]], "; so"),
        ("llama3_json", '{"name": "Alice"}', [], '{"name": "Alice"}'),
        ("llama3_json", '{"function": "sin", "value": 3}', [], '{"function": "sin", "value": 3}'),
        ("llama3_json", '{"type": "object", "name": 3}', [], '{"type": "object", "name": 3}'),
        ("llama3_json", '{"name": "ping"}', [["ping", {}]], ""),
        ("llama3_json", '{"name": "other", "parameters": {}}', [["other", {}]], ""),
    ],
)
def test_a_good_call_is_read_and_an_answer_is_none(name: str, text: str, calls: list[list[Any]], content: str) -> None:
    message = only(text, name)
    assert [[c.name, json.loads(c.arguments)] for c in message.tool_calls] == calls
    assert message.content == content
    for cut in range(len(text)):
        parser = StreamParser(name, TOOLS)
        parser.feed(text[:cut])
        assert parser.finish(text[cut:]) == message


def test_a_bad_call_without_an_end_takes_no_good_one_with_it() -> None:
    good = '<|tool_call_begin|>functions.add:1<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    bad = '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": '
    message = only(f"<|tool_calls_section_begin|>{bad}{good}<|tool_calls_section_end|>", "kimi_k2")
    assert [json.loads(c.arguments) for c in message.tool_calls] == [A]
    assert len(message.malformed) == 1


@pytest.mark.parametrize(
    ("name", "key", "written", "value", "noted"),
    [
        ("write", "text", "12", "12", True),
        ("write", "text", "true", "true", True),
        ("write", "text", "null", None, True),
        ("write", "text", '{"b": 1}', {"b": 1}, True),
        ("add", "a", '"3"', 3, True),
        ("add", "a", '"x"', "x", True),
        ("flag", "on", '"true"', True, True),
        ("ratio", "x", '"2.5"', 2.5, True),
        ("many", "items", '"[1]"', "[1]", True),
        ("note", "tag", "3", "3", True),
        ("note", "tag", "null", None, False),
        ("add", "a", "3", 3, False),
    ],
)
@pytest.mark.parametrize("format_", ["hermes", "llama3_json", "harmony", "kimi_k2"])
def test_a_json_value_is_fitted_to_the_schema_where_nothing_is_lost(
    format_: str, name: str, key: str, written: str, value: Any, noted: bool
) -> None:
    arguments = f'{{"{key}": {written}}}'
    text = {
        "hermes": f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>',
        "llama3_json": f'{{"name": "{name}", "parameters": {arguments}}}',
        "harmony": f"<|channel|>commentary to=functions.{name}<|message|>{arguments}<|call|>",
        "kimi_k2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
        f"{arguments}<|tool_call_end|><|tool_calls_section_end|>",
    }[format_]
    (call,) = only(text, format_).tool_calls
    assert json.loads(call.arguments) == {key: value}
    assert type(json.loads(call.arguments)[key]) is type(value)
    assert any(d.startswith(f"{key}: ") for d in call.diagnostics) == noted


PEERS = {
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseekv31": '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}'
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "functiongemma": "<start_function_call>call:add{a:1}<end_function_call><start_function_response>",
    "glm47": "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>",
    "granite4": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|end_of_text|>',
    "llama4_json": '{"name": "add", "parameters": {"a": 1}}<|eot|>',
    "llama4_pythonic": "<|python_start|>[add(a=1)]<|python_end|><|eot|>",
    "openai": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
    "qwen25": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
}


@pytest.mark.parametrize("name", PEERS)
def test_the_names_that_peers_give_a_format(name: str) -> None:
    message = only(PEERS[name], name)
    assert [(c.name, json.loads(c.arguments), c.diagnostics) for c in message.tool_calls] == [("add", A, ())]
    assert (message.content, message.malformed) == ("", ())


@pytest.mark.parametrize("name", ["inkling", "trinity", "vllm:hf", "sglang:response_template"])
def test_a_format_that_is_not_read_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"the tool-call format '{name}' is not read: "):
        only("", name)


@pytest.mark.parametrize("prefill", [None, "", "<|start|>assistant"])
@pytest.mark.parametrize("channel", ["<|channel|>commentary json", "<|channel|>analysis", ""])
def test_a_recipient_in_a_header_that_the_prompt_began_is_a_call(channel: str, prefill: str | None) -> None:
    message = parse(f' to=functions.add{channel}<|message|>{{"a": 1}}<|call|>', "harmony", TOOLS, prefill=prefill)
    assert [(call.name, call.arguments_dict()) for call in message.tool_calls] == [("add", {"a": 1})]
    assert (message.content, message.reasoning, message.malformed) == ("", "", ())
    assert parse(" to=functions.add is how", "harmony", prefill="").content == " to=functions.add is how"
