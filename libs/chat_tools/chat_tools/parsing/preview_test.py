"""What a stream says of calls before they are complete: early, in small pieces, and never otherwise than they are."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tools.parsing.formats import FORMATS, formats
from chat_tools.parsing.parser import StreamParser, parse
from chat_tools.parsing.result import (
    ArgumentsDelta,
    CallDropped,
    CallFinished,
    CallStarted,
    ParsedMessage,
    Retracted,
    ToolCall,
)
from chat_tools.testing.fuzzing import FRAGMENTS, TOOLS
from chat_tools.testing.samples import write_turn

NEAR = 64
"""Characters within which a server hears of a call, and of more of its argument."""


def told(parser: StreamParser, pieces: Iterable[str]) -> tuple[ParsedMessage, int]:
    """The message, and how many calls were dropped; the events of the others add up to the message's calls."""
    begun: dict[int, tuple[str, str, str | None]] = {}
    finished: dict[int, tuple[str, str, str | None]] = {}
    dropped = 0
    pieces = iter(pieces)
    done = False
    while not done:
        piece = next(pieces, None)
        if piece is None:
            message, done = parser.finish(), True
        events = parser.last_events() if piece is None else parser.feed(piece)
        for event in events:
            if isinstance(event, CallStarted):
                assert event.number not in begun
                begun[event.number] = (event.name, "", event.id)
            elif isinstance(event, ArgumentsDelta):
                assert event.text
                name, arguments, identifier = begun[event.number]
                begun[event.number] = (name, arguments + event.text, identifier)
            elif isinstance(event, CallDropped):
                del begun[event.number]
                dropped += 1
            elif isinstance(event, CallFinished):
                name, arguments, identifier = begun.pop(event.number)
                finished[event.number] = (name, arguments, identifier)
                assert (name, arguments) == (event.call.name, event.call.arguments)
                assert identifier in (None, event.call.id)
            elif isinstance(event, Retracted):
                assert not finished, "what was told is never retracted"
    assert not begun, "a call that was started is finished or dropped"
    assert [finished[index][:2] for index in sorted(finished)] == [(c.name, c.arguments) for c in message.tool_calls]
    return message, dropped


def cut(text: str, size: int) -> list[str]:
    return [text[i : i + size] for i in range(0, len(text), size)]


names = st.from_regex(r"\A[a-z_][a-z0-9_]{0,12}\Z")
usual = st.recursive(
    st.one_of(st.text("abc\n\"\\<>{}é,:'", max_size=12), st.integers(), st.booleans(), st.none()),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from("xyz"), v, max_size=2),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(formats()),
    st.lists(st.tuples(names, st.dictionaries(st.from_regex(r"\A[a-z_]{1,8}\Z"), usual, max_size=4)), max_size=3),
    st.integers(1, 7),
    st.sampled_from([None, ""]),
)
def test_deltas_add_up_to_the_arguments(
    name: str, calls: list[tuple[str, dict[str, Any]]], size: int, prefill: str | None
) -> None:
    text = write_turn(name, calls)
    message, dropped = told(StreamParser(name, prefill=prefill), cut(text, size))
    assert message == parse(text, name, prefill=prefill)
    assert not dropped, "calls as models write them are told once"


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(formats()), st.integers(1, 5), st.sampled_from([None, "", "<think>\n"]))
def test_whatever_a_model_writes_its_events_add_up(
    data: st.DataObject, name: str, size: int, prefill: str | None
) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(FRAGMENTS[name]), max_size=25)))
    message, _ = told(StreamParser(name, TOOLS, prefill=prefill), cut(text, size))
    assert message == parse(text, name, TOOLS, prefill=prefill)


def hears_at_once(parser: StreamParser, text: str, count: int) -> tuple[ToolCall, ...]:
    """The calls of a text fed letter by letter; each of the `count` has a long argument that begins with WORD and its
    number: its start is told by then, and what it says is never more than NEAR characters behind.
    """
    started: dict[int, int] = {}
    last: dict[int, int] = {}
    stop = text.rindex("STOP")
    for place, character in enumerate(text):
        for event in parser.feed(character):
            if isinstance(event, CallStarted):
                started[event.number] = place
            elif isinstance(event, ArgumentsDelta):
                begins = text.index(f"WORD{event.number}")
                assert len(event.text) <= NEAR
                assert place >= stop or place <= max(begins, last.get(event.number, 0)) + NEAR
                last[event.number] = place
            else:
                assert not isinstance(event, CallDropped)
    message = parser.finish()
    assert list(started) == list(range(count))
    assert all(place <= text.index(f"WORD{number}") for number, place in started.items())
    assert not message.malformed
    return message.tool_calls


FILLERS = ["word ", 'it\'s "x" = \\d\\ é\n(a), [1] ']


@pytest.mark.parametrize("name", formats())
@pytest.mark.parametrize("filler", FILLERS, ids=["plain", "quotes"])
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "none"])
def test_a_server_hears_of_long_arguments_at_once(name: str, filler: str, tools: list[dict[str, Any]] | None) -> None:
    """Of each of two calls, behind words and thoughts where the format has calls there."""
    calls = [("f", {"count": 3, "text": f"WORD{i}" + filler * (4_000 // len(filler)) + "STOP"}) for i in range(2)]
    asked = FORMATS[name].opening.endswith(("{", "["))
    for turn in (calls[:1], calls):
        text = write_turn(name, turn, "" if asked else "Let me look.", "I should look.")
        found = hears_at_once(StreamParser(name, tools, prefill=""), text, len(turn))
        for call, (_, arguments) in zip(found, turn, strict=True):
            assert call.arguments_dict()["text"] == arguments["text"]
            assert call.arguments_dict()["count"] in (3, None if tools else "3")  # text where no type is declared


LONG = "WORD0" + "word " * 2000 + "STOP"
SPELLED = [
    ("pythonic", f'[f(count=3, text="{LONG}")]'),
    ("pythonic", f"<|python_start|>[ f ( text = '''{LONG}''', count=3 )]<|python_end|>"),
    ("pythonic", f'[f(items=[1, "a, b)", {{"x": (2, 3)}}], text="""{LONG}""")]'),
    ("pythonic", f"[f(text='{LONG}', flag=True, options={{'mode': 'a'}})]"),
    ("lfm2", f'Look. <|tool_call_start|>[f(text="{LONG}")]<|tool_call_end|>'),
    ("olmo3", f"<function_calls>f(text='{LONG}')</function_calls>"),
    ("olmo3", f"<function_calls>[f(text='{LONG}')]</function_calls>"),
    ("gemma", f"<start_function_call>call:f{{text:<escape>{LONG}<escape>}}<end_function_call>"),
    ("gemma", f'<|tool_call>call:f{{count:3,items:[1,<|"|>a,b<|"|>],text:"{LONG}"}}<tool_call|>'),
    ("gemma", f'call:f{{text:<|"|>{LONG}<|"|>}}'),
    ("mistral", f'[TOOL_CALLS] [{{"name": "f", "arguments": {{"text": "{LONG}"}}}}]'),
    (
        "hermes",
        f'<tool_call>{{"id": "a", "function": {{"name": "f", "arguments": {{"text": "{LONG}"}}}}}}</tool_call>',
    ),
    ("llama3_json", f'{{"type": "function", "function": {{"name": "f", "parameters": {{"text": "{LONG}"}}}}}}'),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"text": \'{LONG}\'}}}}</tool_call>'),
    ("hermes", f'<tool_call>{{"name": "f", "arguments": {{"text": "{LONG[:90]}\n\\d{LONG[90:]}"}}}}</tool_call>'),
]


@pytest.mark.parametrize(("name", "text"), SPELLED, ids=[f"{name}-{i}" for i, (name, _) in enumerate(SPELLED)])
def test_a_long_argument_in_other_spellings(name: str, text: str) -> None:
    (call,) = hears_at_once(StreamParser(name, TOOLS, prefill=""), text, 1)
    assert call.arguments_dict()["text"].startswith("WORD0word word")


def test_an_id_is_told_as_it_is_read() -> None:
    for name, text, identifier in (
        ("cohere", '<|START_ACTION|>[{"tool_call_id": "1 ", "tool_name": "f", "parameters": {}}]', "1 "),
        ("mistral", "[TOOL_CALLS]f[CALL_ID] x1 [ARGS]{}", "x1"),
    ):
        parser = StreamParser(name, prefill="")
        events = [event for letter in text for event in parser.feed(letter)]
        assert events[0] == CallStarted(0, "f", identifier)
        assert parser.finish().tool_calls[0].id == identifier


BROKEN = [
    ("hermes", '<tool_call>{"name": "f", "arguments": {"text": "x', '"} oops</tool_call>'),
    ("pythonic", "[f(text='x", "' oops)]"),
    ("pythonic", "[f(text='x", "', 3)]"),
    ("lfm2", "<|tool_call_start|>[f(text='x", "', count=g())]<|tool_call_end|>"),
    ("olmo3", "<function_calls>f(text='x", "'</function_calls>"),
    ("gemma", '<|tool_call>call:f{text:<|"|>x', '<|"|> oops}<tool_call|>'),
]


@pytest.mark.parametrize(("name", "begun", "rest"), BROKEN)
def test_a_call_that_is_none_is_dropped(name: str, begun: str, rest: str) -> None:
    parser = StreamParser(name, prefill="")
    events = parser.feed(begun)
    assert [type(event).__name__ for event in events] == ["CallStarted", "ArgumentsDelta"]
    events = parser.feed(rest)
    message = parser.finish()
    events += parser.last_events()
    assert [type(event).__name__ for event in events if not isinstance(event, ArgumentsDelta)][:2] == [
        "CallDropped",
        "MalformedFound",
    ]
    assert not message.tool_calls


@pytest.mark.parametrize(
    ("name", "pieces", "arguments"),
    [
        (
            "qwen3_xml",
            "<tool_call>\n<function=f>\n<parameter=a>\n1|\n</parameter>\n<parameter=a>\n2\n</parameter>\n</function>",
            '{"a": "2"}',
        ),
        ("pythonic", "[f(a='1|', a='2')]", '{"a": "2"}'),
        ("gemma", '<|tool_call>call:f{a:<|"|>1|<|"|>,a:<|"|>2<|"|>}<tool_call|>', '{"a": "2"}'),
        ("pythonic", "[f(a='é|\\ud800')]", '{"a": "\\u00e9\\ud800"}'),  # a lone surrogate has all spelled anew
    ],
)
def test_a_call_that_is_read_in_another_way_is_told_again(name: str, pieces: str, arguments: str) -> None:
    message, dropped = told(StreamParser(name, prefill=""), pieces.split("|") if "|>" not in pieces else cut(pieces, 3))
    assert dropped == 1
    assert message.tool_calls[0].arguments == arguments


@pytest.mark.parametrize("name", formats())
@pytest.mark.parametrize("schema", [{"type": ["string", "null"]}, {"anyOf": [{"type": "null"}, {"type": "string"}]}])
@pytest.mark.parametrize("value", [LONG, "3 WORD0 " + "more " * 2000 + "STOP"])
def test_a_long_argument_that_may_be_null(name: str, schema: dict[str, Any], value: str) -> None:
    tools = [{"name": "f", "parameters": {"type": "object", "properties": {"text": schema}}}]
    (call,) = hears_at_once(StreamParser(name, tools, prefill=""), write_turn(name, [("f", {"text": value})]), 1)
    assert call.arguments_dict() == {"text": value}


THINKING = [
    name for name in formats() if any(closing not in FORMATS[name].ends for _, closing in FORMATS[name].reasoning)
]


@pytest.mark.parametrize("name", THINKING)
def test_without_a_prefill_calls_are_told_when_they_are_known_to_be_no_reasoning(name: str) -> None:
    """The same text can be an answer, or thoughts that the prompt opened: only its end, or thoughts seen, tell."""
    text, (opening, closing) = write_turn(name, [("f", {"text": "x" * 200})]), FORMATS[name].reasoning[0]
    parser = StreamParser(name, TOOLS)
    early = [event for letter in text for event in parser.feed(letter)]
    assert not [event for event in early if isinstance(event, CallStarted | ArgumentsDelta | CallFinished)]
    assert len(parser.finish().tool_calls) == 1
    assert [type(event) for event in parser.last_events()][:1] == [CallStarted]

    parser = StreamParser(name, TOOLS)
    for letter in text:
        parser.feed(letter)
    assert [type(event) for event in parser.feed(f"{closing}So.")][:1] == [Retracted]
    assert parser.finish().tool_calls == ()

    for before, prefill in ((f"{opening}so{closing}", None), (f"so{closing}", f"{opening}\n"), ("", "")):
        parser = StreamParser(name, TOOLS, prefill=prefill)
        early = [event for letter in before + text[: text.index("x" * 200) + 100] for event in parser.feed(letter)]
        assert sum(isinstance(event, CallStarted) for event in early) == 1, prefill
        assert sum(len(event.text) for event in early if isinstance(event, ArgumentsDelta)) > 30


def test_an_end_of_thinking_that_ends_all_else_makes_nothing_before_it_thoughts() -> None:
    """Solar's `<|end|>` ends each of its messages."""
    call = write_turn("solar", [("f", {"text": "x" * 200})])
    parser = StreamParser("solar", TOOLS)
    early = [event for letter in call for event in parser.feed(letter)]
    assert sum(isinstance(event, CallStarted) for event in early) == 1
    message = StreamParser("solar", TOOLS).finish(f"<|think|>so<|end|><|begin|>assistant<|content|>Hi.<|end|>{call}")
    assert (message.reasoning, message.content, len(message.tool_calls)) == ("so", "Hi.", 1)


def test_a_format_whose_thoughts_are_messages_needs_no_prefill() -> None:
    assert set(formats()) - set(THINKING) == {"harmony", "muse_glimmer", "solar", "functionary_v3.2"}
    text = write_turn("harmony", [("f", {"text": LONG})])
    assert len(hears_at_once(StreamParser("harmony", TOOLS), text, 1)) == 1
