"""What holds for every text: no exception, no lost character, valid JSON; a stream gives what the whole gives."""

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tools.fuzzing import FRAGMENTS, TOOLS
from chat_tools.grammar import FORMATS, formats
from chat_tools.message import ParsedMessage
from chat_tools.parser import StreamParser, parse

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


@settings(max_examples=250, deadline=None)
@given(st.data(), NAMES, st.booleans())
def test_every_cut_gives_what_the_whole_gives(data, name, typed):
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
def test_letter_by_letter(data, name):
    text = data.draw(texts(name))
    parser = StreamParser(name, TOOLS)
    for letter in text:
        parser.feed(letter)
    assert parser.finish() == parse(text, name, TOOLS)


@settings(max_examples=80, deadline=None)
@given(st.data(), NAMES, st.sampled_from(["", "<think>\n", "<|start|>assistant<|channel|>analysis<|message|>"]))
def test_what_the_prompt_began(data, name, prefill):
    text = data.draw(texts(name))
    check(parse(text, name, TOOLS, prefill=prefill), text)


@settings(max_examples=80, deadline=None)
@given(NAMES, st.binary(max_size=60), st.integers(0, 60))
def test_bytes_cut_anywhere(name, raw, cut):
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
def test_operations_are_linear(name):
    for text, longer in zip(adversarial(name, 1_000), adversarial(name, 8_000), strict=True):
        message = parse(longer, name)
        check(message, longer)
        assert message.operations <= BYTES_PER_OPERATION * len(longer), longer[:40]
        assert message.operations <= 10 * parse(text, name).operations + 1000, longer[:40]


@pytest.mark.parametrize("name", formats())
def test_a_megabyte_in_well_under_a_second(name):
    slowest = max(adversarial(name, 1_000), key=lambda text: parse(text, name).operations)
    text = (slowest * 1000)[:1_000_000]
    start = time.process_time()
    message = parse(text, name)
    seconds = time.process_time() - start
    check(message, text)
    assert message.operations <= BYTES_PER_OPERATION * len(text)
    assert seconds < 3, f"{seconds:.2f} s for {text[:40]!r}"


def test_all_formats_have_fragments():
    assert set(FRAGMENTS) == set(FORMATS)
