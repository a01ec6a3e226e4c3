"""What holds for every text: no exception, no lost character, valid JSON; a stream gives what the whole gives."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tools.parsing import cursor
from chat_tools.parsing.formats import FORMATS, formats
from chat_tools.parsing.parser import StreamParser, parse
from chat_tools.parsing.result import ParsedMessage
from chat_tools.testing.fuzzing import FRAGMENTS, SEARCHED, TOOLS, WORST
from chat_tools.testing.samples import write_turn

BYTES_PER_OPERATION = 40  # fed at once, no text costs more operations than this a character
NAMES = st.sampled_from(formats())


def texts(name: str) -> st.SearchStrategy[str]:
    """Texts made of the format's own markers, of bits of values, and of anything."""
    return st.lists(st.one_of(st.sampled_from(FRAGMENTS[name]), st.text(max_size=8)), max_size=30).map("".join)


def check(message: ParsedMessage, text: str) -> None:
    assert message.text == text
    edges = [0, *(s.end for s in message.segments)]
    assert [s.start for s in message.segments] == edges[:-1]
    assert edges[-1] == len(text)
    assert all(s.start <= s.inner_start <= s.inner_end <= s.end for s in message.segments)
    calls = [s for s in message.segments if s.kind == "call"]
    assert {c.span for c in message.tool_calls} == {(s.start, s.end) for s in calls}
    assert {m.span for m in message.malformed} == {(s.start, s.end) for s in message.segments if s.kind == "malformed"}
    for call in message.tool_calls:
        assert call.name
        values = json.loads(call.arguments, parse_constant=pytest.fail)
        assert isinstance(values, dict)
        call.arguments.encode()


@settings(max_examples=120, deadline=None)
@given(st.data(), NAMES, st.booleans())
def test_every_cut_gives_what_the_whole_gives(data: st.DataObject, name: str, typed: bool) -> None:
    text = data.draw(texts(name))
    tools = TOOLS if typed else None
    whole = parse(text, name, tools)
    check(whole, text)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parser = StreamParser(name, tools)
    for start, end in pairwise([0, *cuts, len(text)]):
        parser.feed(text[start:end])
    assert parser.finish() == whole


@settings(max_examples=100, deadline=None)
@given(st.data(), NAMES)
def test_letter_by_letter(data: st.DataObject, name: str) -> None:
    text = data.draw(texts(name))
    parser = StreamParser(name, TOOLS)
    for letter in text:
        parser.feed(letter)
    assert parser.finish() == parse(text, name, TOOLS)


@settings(max_examples=80, deadline=None)
@given(st.data(), NAMES, st.sampled_from(["", "<think>\n", "<|start|>assistant<|channel|>analysis<|message|>"]))
def test_what_the_prompt_began(data: st.DataObject, name: str, prefill: str) -> None:
    text = data.draw(texts(name))
    check(parse(text, name, TOOLS, prefill=prefill), text)


@settings(max_examples=80, deadline=None)
@given(NAMES, st.binary(max_size=60), st.integers(0, 60))
def test_bytes_cut_anywhere(name: str, raw: bytes, cut: int) -> None:
    parser = StreamParser(name)
    parser.feed(raw[:cut])
    parser.feed(raw[cut:])
    assert parser.finish().text == raw.decode("utf-8", "replace")


def adversarial(name: str, size: int) -> list[str]:
    """Texts that make a careless parser go back and forth."""
    units = [*FRAGMENTS[name], " ", "\n", "<", '"', '\\"', "[", "[]", "{", "'", '{"a":"', '", "', '<tool_call>[",', "a"]
    opened = [a + b for a in FRAGMENTS[name] for b in ('["', "['", '{"x": "', "\n")]
    return [(u * (size // len(u) + 1))[:size] for u in (*units, *opened)]


@pytest.mark.parametrize("name", formats())
def test_operations_are_linear(name: str) -> None:
    for text, longer in zip(adversarial(name, 1_000), adversarial(name, 8_000), strict=True):
        message = parse(longer, name)
        check(message, longer)
        assert message.operations <= BYTES_PER_OPERATION * len(longer), longer[:40]
        assert message.operations <= 10 * parse(text, name).operations + 1000, longer[:40]


@pytest.mark.parametrize("name", SEARCHED)
def test_the_worst_known_texts_are_linear_whole_and_in_pieces(name: str) -> None:
    for known in WORST[name]:
        text, longer = known.of(20_000), known.of(160_000)
        tools = TOOLS if known.typed else None
        message = parse(longer, name, tools)
        check(message, longer)
        assert message.operations <= 10 * parse(text, name, tools).operations + 10_000, known
        parser = StreamParser(name, tools)
        for start in range(0, len(longer), 16):
            parser.feed(longer[start : start + 16])
        streamed = parser.finish()
        assert streamed == message, known
        assert streamed.operations <= BYTES_PER_OPERATION * len(longer), known


@pytest.mark.parametrize("name", SEARCHED)
def test_a_megabyte_of_the_worst_costs_no_more_operations(name: str) -> None:
    """What it takes in seconds is printed by benchmarks/adversarial.py."""
    for known in WORST[name]:
        text = known.of(1_000_000)
        message = parse(text, name, TOOLS if known.typed else None)
        assert "".join(text[s.start : s.end] for s in message.segments) == text
        assert message.operations <= BYTES_PER_OPERATION * len(text)


@settings(max_examples=80, deadline=None)
@given(st.data(), NAMES, st.integers(0, 60))
def test_dense_text_is_passed_over_in_the_same_way_however_it_is_cut(
    data: st.DataObject, name: str, budget: int
) -> None:
    text = data.draw(texts(name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cursor, "SCAN_BUDGET", budget)
        whole = parse(text, name, TOOLS)
        check(whole, text)
        parser = StreamParser(name, TOOLS)
        for letter in text:
            parser.feed(letter)
        assert parser.finish() == whole


@pytest.mark.parametrize("name", ["qwen3_xml", "hermes", "kimi_k2", "mistral"])
def test_a_call_after_very_dense_text_is_read(name: str) -> None:
    marker = FORMATS[name].calls[0][0]
    call = write_turn(name, [("f", {"text": "x"})])
    text = (marker + "\n") * 20_000 + "quiet words\n" * 20_000 + call
    message = parse(text, name, TOOLS)
    assert any(m.reason == cursor.TOO_DENSE for m in message.malformed)
    assert [(c.name, c.arguments) for c in message.tool_calls] == [("f", '{"text": "x"}')]


@pytest.mark.parametrize(("count", "words"), [(1500, ""), (2000, "some more words " * 20)])
def test_very_many_calls_are_no_dense_text(count: int, words: str) -> None:
    for name in SEARCHED:
        calls = [("f", {"text": f"{words}{i}"}) for i in range(count)]
        message = parse(write_turn(name, calls), name, TOOLS)
        assert [json.loads(c.arguments)["text"] for c in message.tool_calls] == [f"{words}{i}" for i in range(count)]
        assert not message.malformed


def test_reasoning_in_dense_text_stays_reasoning() -> None:
    """A call quoted in a block of reasoning is not executed, even where the text around the block is passed over."""
    call = write_turn("hermes", [("f", {"text": "x"})])
    text = "</s></tool_call>" * 20_000 + f"<think>{call}</think>" + "</tool_call>" * 20_000
    message = parse(text, "hermes", TOOLS)
    assert message.tool_calls == ()
    assert message.reasoning == call.strip()


def test_all_formats_have_fragments() -> None:
    assert set(FRAGMENTS) == set(WORST) == set(FORMATS)
