"""Arguments as elements: what nests is a list or an object by the schema, and nothing half-written is executed."""

from typing import Any

import pytest

from chat_tools.parsing.arguments import Schema
from chat_tools.parsing.parser import StreamParser, parse
from chat_tools.parsing.result import ArgumentsDelta, CallDropped, CallFinished, CallStarted, ParsedMessage

NS = "]<]minimax[>["


def tag(name: str, *inside: str) -> str:
    return f"{NS}<{name}>{''.join(inside)}{NS}</{name}>"


def read(arguments: str, properties: Schema | None = None) -> ParsedMessage:
    tools = [{"name": "f", "parameters": {"type": "object", "properties": properties}}] if properties else None
    return parse(
        f'{NS}<tool_call>\n{NS}<invoke name="f">\n{arguments}\n{NS}</invoke>\n{NS}</tool_call>', "minimax_m3", tools
    )


def arguments(text: str, properties: Schema | None = None) -> dict[str, Any]:
    message = read(text, properties)
    assert not message.malformed
    return message.tool_calls[0].arguments_dict()


def test_the_schema_says_what_an_element_with_others_in_it_is() -> None:
    rows = tag(
        "rows", tag("item", tag("sku", "a-1"), tag("count", "2")), tag("item", tag("sku", "7"), tag("count", "3"))
    )
    row = {"type": "object", "properties": {"sku": {"type": "string"}, "count": {"type": "integer"}}}
    expected = [{"sku": "a-1", "count": 2}, {"sku": "7", "count": 3}]
    assert arguments(rows, {"rows": {"type": "array", "items": row}}) == {"rows": expected}
    nullable = {"anyOf": [{"type": "null"}, {"type": "array", "items": row}]}
    assert arguments(rows, {"rows": nullable}) == {"rows": expected}
    one = tag("one", tag("item", "1"))
    assert arguments(one, {"one": {"type": "object", "properties": {"item": {"type": "integer"}}}}) == {
        "one": {"item": 1}
    }
    assert arguments(one, {"one": {"type": "array", "items": {"type": "integer"}}}) == {"one": [1]}
    pair = {"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}]}
    assert arguments(tag("p", tag("item", "1"), tag("item", "1")), {"p": pair}) == {"p": ["1", 1]}


def test_without_a_schema_values_are_text_and_lists_are_of_items() -> None:
    assert arguments(tag("a", "1") + tag("b", tag("item", "x"), tag("item", "y"))) == {"a": "1", "b": ["x", "y"]}
    assert arguments(tag("a", tag("x", "1"), tag("y", " 2 "))) == {"a": {"x": "1", "y": " 2 "}}
    assert arguments(tag("a", tag("x", "1"), tag("x", "2"))) == {"a": {"x": ["1", "2"]}}


@pytest.mark.parametrize(("kind", "value"), [("array", []), ("object", {}), ("string", "")])
def test_an_empty_element(kind: str, value: object) -> None:
    assert arguments(tag("a"), {"a": {"type": kind}}) == {"a": value}


def test_what_does_not_fit_is_said_once_and_kept() -> None:
    (call,) = read(tag("n", "many"), {"n": {"type": "integer"}}).tool_calls
    assert call.arguments_dict() == {"n": "many"}
    assert len(call.diagnostics) == 1
    assert "n: " in call.diagnostics[0]


@pytest.mark.parametrize(
    "text",
    [
        f"{NS}<a>1",
        f"{NS}<a>{NS}<b>1{NS}</a>",
        f"1{NS}</a>",
        f"{NS}<a>{NS}<b>1{NS}</c>{NS}</a>",
        "".join(f"{NS}<a{i}>" for i in range(70)) + "".join(f"{NS}</a{i}>" for i in reversed(range(70))),
    ],
)
def test_what_is_not_closed_is_no_call(text: str) -> None:
    message = read(text)
    assert not message.tool_calls
    assert message.malformed


def test_markup_without_the_prefix_is_text() -> None:
    value = "<b>1</b> </invoke> <tool_call>"
    assert arguments(tag("a", value)) == {"a": value}


def test_a_missing_closing_tag_of_the_call() -> None:
    text = f'{NS}<tool_call>{NS}<invoke name="f">{tag("a", "1")}'
    (call,) = parse(f"{text}{NS}</tool_call>", "minimax_m3").tool_calls
    assert call.diagnostics == ("the call's closing tag is missing",)
    assert not parse(text, "minimax_m3").tool_calls  # cut off: more may have been to come
    (call,) = parse(text, "minimax_m3", [{"name": "f", "parameters": {"properties": {"a": {}}}}]).tool_calls
    assert call.arguments_dict() == {"a": "1"}


def test_a_stream_says_that_a_call_begins() -> None:
    parser = StreamParser("minimax_m3", prefill="")
    events = parser.feed(f'{NS}<tool_call>\n{NS}<invoke name="f">\n{NS}<a>1')
    assert events == [CallStarted(0, "f", None), ArgumentsDelta(0, '{"a": "1')]
    twice = parser.feed(f"{NS}</a>{tag('a', '2')}{NS}</invoke>")  # a name that comes again makes a list
    assert isinstance(twice[0], CallDropped)
    assert isinstance(twice[-1], CallFinished)
    assert (twice[-1].number, twice[-1].call.arguments) == (1, '{"a": ["1", "2"]}')


def test_a_stream_says_what_is_certain_of_the_arguments() -> None:
    properties = {"n": {"type": "integer"}, "s": {"type": "string"}, "l": {"type": "array"}}
    tools = [{"name": "f", "parameters": {"type": "object", "properties": properties}}]
    parser = StreamParser("minimax_m3", tools, prefill="")
    text = (
        f'{NS}<tool_call>{NS}<invoke name="f">{tag("n", "3")}{tag("s", "a]<b")}{tag("l")}{NS}</invoke>{NS}</tool_call>'
    )
    events = [event for character in text for event in parser.feed(character)]
    said = [event.text for event in events if isinstance(event, ArgumentsDelta)]
    (call,) = parser.finish().tool_calls
    assert call.arguments == '{"n": 3, "s": "a]<b", "l": []}' == "".join(said)
    assert said[0] == '{"n": 3'
    assert said[-1] == ', "l": []}'
    assert not any(isinstance(event, CallDropped) for event in events)


def test_a_tag_that_holds_the_end_of_the_turn_is_none_however_it_is_cut() -> None:
    text = f'{NS}<invoke name="f">{tag("a", "1")}{NS}<[e~[b>2{NS}</b>{NS}</invoke>'
    whole = parse(text, "minimax_m3")
    parser = StreamParser("minimax_m3")
    for character in text:
        parser.feed(character)
    assert parser.finish() == whole
    assert whole.tool_calls[0].diagnostics[-1] == "the call's closing tag is missing"


BODIES = {
    "qwen3_xml": "<tool_call>\n<function=rm>\nBODY\n</function>\n</tool_call>",
    "deepseek_v3.2": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="rm">\nBODY\n</｜DSML｜invoke>'
    "\n</｜DSML｜function_calls>",
    "minimax": '<minimax:tool_call><invoke name="rm">BODY</invoke></minimax:tool_call>',
    "minimax_m3": f'{NS}<tool_call>{NS}<invoke name="rm">BODY{NS}</invoke>{NS}</tool_call>',
    "seed": "<seed:tool_call><function=rm>BODY</function></seed:tool_call>",
    "glm-4.5": "<tool_call>rm\nBODY</tool_call>",
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_that_is_no_argument_is_malformed_and_kept(name: str) -> None:
    body = '{"path": "/tmp/x"}'
    message = parse(BODIES[name].replace("BODY", body), name, prefill="")
    assert message.tool_calls == ()
    assert [bad.reason for bad in message.malformed] == ["the call's body is no argument"]
    assert body in message.to_message()["content"]
    assert parse(BODIES[name].replace("BODY", ""), name, prefill="").tool_calls[0].arguments == "{}"


def test_an_argument_that_is_not_closed_does_not_take_the_next_one() -> None:
    tag = '<｜DSML｜parameter name="KEY" string="true">'
    a, b = tag.replace("KEY", "a"), tag.replace("KEY", "b")
    text = BODIES["deepseek_v3.2"].replace("BODY", f"{a}one {b}two</｜DSML｜parameter>")
    (call,) = parse(text, "deepseek_v3.2", prefill="").tool_calls
    assert (call.arguments_dict(), call.diagnostics) == (
        {"a": "one ", "b": "two"},
        ("an argument's closing tag is missing",),
    )
    within = BODIES["qwen3_xml"].replace("BODY", "<parameter=a>one <parameter=b>two</parameter>")
    (call,) = parse(within, "qwen3_xml", prefill="").tool_calls
    assert call.diagnostics == ("an argument's value holds the tag of another one",)
