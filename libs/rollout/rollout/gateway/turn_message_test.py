"""The deltas of a turn add up to what chat_tools reads in the whole text, however the text comes."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat_tools.parsing.formats import find_format, formats
from chat_tools.parsing.parser import parse
from chat_tools.testing.samples import write_turn
from rollout.gateway.turn_message import TurnMessage
from rollout.testing.gateway import ADD, CALL

WORDS = st.sampled_from(
    ["a", " ", "\n", "Let me.", CALL, "<tool_call>", "</tool_call>", "<function=", "<think>", "</think>", "<|im_end|>"]
)
CUTS = st.lists(st.integers(1, 9), max_size=12)


def read(
    text: str, cuts: list[int], prefill: str = "", may_call: bool = True, tool_format: str = "qwen3_xml"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message of a text that comes in these cuts, and the deltas as a client adds them up."""
    numbers = iter(range(5, 1000))
    reader = TurnMessage(tool_format, [ADD], prefill, may_call=may_call, number=lambda: next(numbers))
    added: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for cut in cuts:
        add(added, reader.feed(text[:cut]))
        text = text[cut:]
    add(added, reader.feed(text))
    add(added, reader.finish())
    return reader.message(), added


def add(added: dict[str, Any], deltas: Iterable[dict[str, Any]]) -> None:
    for delta in deltas:
        ((part, value),) = delta.items()
        if part == "tool_calls":
            assert [call.pop("index") for call in value] == [len(added[part])]
        assert value
        added[part] += value


def wanted(text: str, prefill: str, may_call: bool, tool_format: str = "qwen3_xml") -> dict[str, Any]:
    """By chat_tools' own whole-text reader."""
    turn = parse(text, tool_format, tools=[ADD], prefill=prefill)
    message = turn.to_openai(5)
    if not may_call and turn.tool_calls:
        del message["tool_calls"]
        message["content"] = None  # compared by its words below
    return message


@given(st.lists(WORDS, max_size=7).map("".join), CUTS, st.sampled_from(["", "<think>\n"]), st.booleans())
def test_whatever_the_text_and_its_cuts_the_deltas_add_up_to_the_message(
    text: str, cuts: list[int], prefill: str, may_call: bool
) -> None:
    message, added = read(text, cuts, prefill, may_call)
    assert (added["content"], added["reasoning_content"], added["tool_calls"]) == (
        message["content"] or "",
        message.get("reasoning_content", ""),
        message.get("tool_calls", []),
    )
    assert message == read(text, [], prefill, may_call)[0]
    whole = wanted(text, prefill, may_call)
    if whole["content"] is not None:
        assert (message["content"] or "") == whole["content"]
    assert message.get("reasoning_content", "").split() == whole.get("reasoning_content", "").split()
    assert message.get("tool_calls") == whole.get("tool_calls")


@given(st.text("ab \n", max_size=6), st.text("ab \n", max_size=6), CUTS)
def test_a_call_that_may_not_be_one_stays_in_the_content_as_it_was_written(
    before: str, after: str, cuts: list[int]
) -> None:
    message, _ = read(before + CALL + after, cuts, may_call=False)
    assert "tool_calls" not in message
    assert message["content"].strip() == (before + CALL + after).strip()


@pytest.mark.parametrize("name", formats())
def test_every_formats_calls_are_told(name: str) -> None:
    bare = find_format(name).opening.endswith(("{", "["))  # calls begin the answer
    text = write_turn(name, [("add", {"a": 37, "b": 58})], *([] if bare else ["Let me.", "Sum."]))
    whole = parse(text, name, tools=[ADD], prefill="").to_openai(5)
    message, added = read(text, [1] * len(text), tool_format=name)
    assert message.get("tool_calls") == added["tool_calls"] == whole["tool_calls"]
    assert json.loads(added["tool_calls"][0]["function"]["arguments"]) == {"a": 37, "b": 58}
    assert ((message["content"] or ""), message.get("reasoning_content")) == (
        whole["content"],
        whole.get("reasoning_content"),
    )


def test_what_is_settled_is_told_at_once() -> None:
    reader = TurnMessage("qwen3_xml", [ADD], "<think>\n", may_call=True, number=lambda: 0)
    assert reader.feed("Sum") == [{"reasoning_content": "Sum"}]
    assert reader.feed(" up \n") == [{"reasoning_content": " up"}]
    assert reader.feed("</think>\n\n") == []
    assert reader.feed("Let me") == [{"content": "Let me"}]
    assert reader.feed(" add.\n" + CALL[:-25]) == [{"content": " add."}]
    (delta,) = reader.feed(CALL[-25:])
    assert delta["tool_calls"][0]["function"]["name"] == "add"
    assert reader.finish() == []
