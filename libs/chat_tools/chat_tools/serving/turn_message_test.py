"""What a stream's client adds up is what the whole text gives, in every format and however the text is cut."""

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tools.parsing.formats import formats
from chat_tools.parsing.parser import parse
from chat_tools.serving.turn_message import TurnMessage
from chat_tools.testing.fuzzing import FRAGMENTS, TOOLS

NAMES = st.sampled_from(formats())
FIRST = 7  # calls that went before the turn


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def added(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The message as a client of OpenAI's stream adds it up, without calls that broke off."""
    parts = {"content": "", "reasoning_content": ""}
    entries: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for part in parts.keys() & delta.keys():
            parts[part] += delta[part]
        for call in delta.get("tool_calls", ()):
            entry = entries.setdefault(call["index"], {"function": {"arguments": ""}})
            said = call["function"]
            entry |= {key: call[key] for key in ("type", "id") if key in call}
            entry["function"] |= {"name": said["name"]} if "name" in said else {}
            entry["function"]["arguments"] += said["arguments"]
    message: dict[str, Any] = {"role": "assistant", "content": parts["content"]}
    if parts["reasoning_content"]:
        message["reasoning_content"] = parts["reasoning_content"]
    calls = [entry for _, entry in sorted(entries.items()) if is_json(entry["function"]["arguments"])]
    return {**message, "tool_calls": calls} if calls else message


def streamed(text: str, name: str, cuts: Iterable[int], prefill: str, early: bool = True) -> list[dict[str, Any]]:
    numbers = iter(range(FIRST, 10_000))
    reader = TurnMessage(name, TOOLS, prefill=prefill, number=lambda: next(numbers), early=early)
    edges = [0, *sorted(cuts), len(text)]
    deltas = [delta for start, end in pairwise(edges) for delta in reader.feed(text[start:end])]
    return deltas + reader.finish()


@settings(max_examples=400, deadline=None)
@given(st.data(), NAMES, st.sampled_from(["", "<think>\n"]), st.booleans())
def test_what_a_client_adds_up_is_what_the_whole_gives(
    data: st.DataObject, name: str, prefill: str, early: bool
) -> None:
    parts = st.one_of(st.sampled_from(FRAGMENTS[name]), st.text(" \nab<", max_size=4))
    text = data.draw(st.lists(parts, max_size=14).map("".join))
    every = data.draw(st.booleans())
    cuts = range(1, len(text)) if every else data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    whole = parse(text, name, TOOLS, prefill=prefill).to_openai(FIRST)
    assert added(streamed(text, name, cuts, prefill, early)) == whole


def told(text: str, name: str = "hermes") -> list[dict[str, Any]]:
    return streamed(text, name, range(1, len(text)), "")


def test_a_call_is_told_as_it_comes() -> None:
    reader = TurnMessage("hermes", TOOLS, prefill="")
    assert reader.feed("Look.\n<tool_call>") == [{"content": "Look."}]
    ((begun,), (more,)) = (d["tool_calls"] for d in reader.feed('{"name": "f", "arguments": {"text": "so'))
    assert (begun["id"], begun["function"]) == ("call00000", {"name": "f", "arguments": ""})
    assert more == {"index": 0, "function": {"arguments": '{"text": "so'}}
    assert reader.feed('"}}</tool_call>') == [{"tool_calls": [{"index": 0, "function": {"arguments": '"}'}}]}]
    assert reader.finish() == []
    assert reader.message() == {"refusal": None, **reader.message(), "content": "Look."}


def test_a_key_given_twice_is_told_again_under_the_id_of_the_whole() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"text": "x", "text": "y"}}</tool_call>'
    begun = [call for delta in told(text) for call in delta["tool_calls"] if "id" in call]
    assert [(call["index"], call["id"]) for call in begun] == [(0, "call00007"), (1, "call00007")]
    (call,) = added(told(text))["tool_calls"]
    assert call["function"]["arguments"] == '{"text": "y"}'


def test_what_is_malformed_is_content() -> None:
    text = 'Use <tool_call> tags, so: <tool_call>{"name": 5}</tool_call> bye'
    assert added(told(text)) == {"role": "assistant", "content": text}
