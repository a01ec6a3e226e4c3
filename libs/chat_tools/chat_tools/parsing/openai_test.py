"""Both ways between chat messages and the API's lose nothing; a stream's deltas have the API's shape."""

import copy
import json
import pickle
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tools.parsing.openai import Arguments, delta_of, from_openai, to_openai
from chat_tools.parsing.parser import StreamParser
from chat_tools.parsing.result import TextDelta

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
scalars = st.one_of(words, st.integers(), st.booleans(), st.none(), st.floats(-1e9, 1e9))
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(words, v, max_size=3), max_leaves=8)
objects = st.dictionaries(words, values, max_size=4)
spelled = st.one_of(
    objects.map(json.dumps),
    objects.map(lambda v: json.dumps(v, indent=2, ensure_ascii=False)),
    st.sampled_from(['{"a": 1.0, "a": 2}', '{"a":1E5}', "{", "[1]", "", '"x"', '{"\\u00e9": "\\ud800"}', '{"a": NaN}']),
    st.sampled_from(['{"a": 1e999}', '{"a": [-1E400, 1]}']),  # numbers that no float holds
)
ids = st.none() | st.sampled_from(["call_1", "call00000", "functions.f:0"])


@st.composite
def conversations(draw: st.DrawFn, arguments: st.SearchStrategy[Any]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw(words)}]
    for _ in range(draw(st.integers(0, 3))):
        calls: list[dict[str, Any]] = []
        for _ in range(draw(st.integers(0, 2))):
            call = {"type": "function", "function": {"name": draw(words), "arguments": draw(arguments)}}
            if draw(st.booleans()):
                call["id"] = f"{draw(words)}-{len(messages)}-{len(calls)}"
            calls.append(call)
        message: dict[str, Any] = {"role": "assistant", "content": draw(st.none() | words), "refusal": None}
        messages.append({**message, "tool_calls": calls} if bool(calls) or draw(st.booleans()) else message)
        for call in calls:
            result: dict[str, Any] = {"role": "tool", "content": [{"type": "text", "text": draw(words)}]}
            messages.append({**result, "tool_call_id": call["id"]} if "id" in call else result)
    return messages


@settings(max_examples=50, deadline=None)
@given(conversations(spelled))
def test_what_the_api_sends_comes_back_as_it_was(messages: list[dict[str, Any]]) -> None:
    messages = to_openai(messages)  # complete: every call has an id, every result names it
    before = copy.deepcopy(messages)
    taken = from_openai(messages)
    assert to_openai(taken) == before == messages
    assert to_openai(pickle.loads(pickle.dumps(copy.deepcopy(taken)))) == before


@settings(max_examples=50, deadline=None)
@given(conversations(objects))
def test_what_a_template_takes_comes_back_as_it_was(messages: list[dict[str, Any]]) -> None:
    before = copy.deepcopy(messages)
    sent = to_openai(messages)
    assert messages == before
    given_ids = [call["id"] for message in sent for call in message.get("tool_calls") or ()]
    assert len(set(given_ids)) == len(given_ids)
    assert [m["tool_call_id"] for m in sent if m["role"] == "tool"] == given_ids
    for message, back in zip(before, from_openai(json.loads(json.dumps(sent))), strict=True):
        for call, other in zip(message.get("tool_calls") or (), back.get("tool_calls") or (), strict=True):
            call.setdefault("id", other["id"])
        if message["role"] == "tool":
            message.setdefault("tool_call_id", back["tool_call_id"])
        assert message == back


def test_changed_values_are_sent_as_they_are_now() -> None:
    (taken,) = from_openai([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":1}'}}]}])
    arguments = taken["tool_calls"][0]["function"]["arguments"]
    assert isinstance(arguments, Arguments)
    assert arguments == {"a": 1}
    arguments["a"] = True
    (sent,) = to_openai([taken])
    assert sent["tool_calls"] == [{"function": {"name": "f", "arguments": '{"a": true}'}, "id": "call00000"}]


def test_refusals() -> None:
    for wrong in ("x", [1], [{"name": "f"}]):
        with pytest.raises(ValueError, match="tool_calls of message 0"):
            from_openai([{"role": "assistant", "tool_calls": wrong}])
    with pytest.raises(ValueError, match="message 0 is a tool's result"):
        to_openai([{"role": "tool", "content": "x"}])


def call(identifier: Any, arguments: Any = "{}") -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": identifier, "function": {"name": "f", "arguments": arguments}}]}


def test_wrong_messages_are_named_by_their_place() -> None:
    for convert in (to_openai, from_openai):
        with pytest.raises(ValueError, match="message 1 must be a mapping"):
            convert([{"role": "user", "content": "x"}, "x"])  # type: ignore[list-item]
    for value in ({1, 2}, {"a": {1, 2}}, {"a": b"x"}, {"a": float("nan")}, {"a": 10**5000}):
        with pytest.raises(ValueError, match="message 0 has arguments that JSON does not have"):
            to_openai([call("1", value)])
    with pytest.raises(ValueError, match="message 0 has a call whose id is no text"):
        to_openai([call([1])])


def test_an_id_may_be_used_again_in_a_later_turn() -> None:
    """Kimi numbers the calls of each turn anew."""
    turn = call("functions.f:0")
    named = {"role": "tool", "tool_call_id": "functions.f:0", "content": "a"}
    bare = {"role": "tool", "content": "b"}
    assert to_openai([turn, named, turn, bare]) == [turn, named, turn, {**bare, "tool_call_id": "functions.f:0"}]
    two = {"role": "assistant", "tool_calls": [*turn["tool_calls"], *call("x")["tool_calls"]]}
    last = {"role": "tool", "tool_call_id": "x", "content": "c"}
    assert to_openai([turn, bare, two, last, bare])[-1]["tool_call_id"] == "functions.f:0"
    with pytest.raises(ValueError, match="message 2 is a tool's result"):
        to_openai([turn, named, bare])


def test_deltas_in_the_shape_of_the_api() -> None:
    text = 'Look. <tool_call>{"name": "f", "arguments": {"a": "xy"}}</tool_call>'
    parser = StreamParser("hermes", prefill="<think>")
    deltas = [delta_of(e, first_call=2) for c in f"so</think>{text}" for e in parser.feed(c)]
    said = [d for d in deltas if d is not None]
    assert "".join(d.get("reasoning_content", "") for d in said) == "so"
    assert "".join(d.get("content", "") for d in said) == "Look. "
    calls = [d["tool_calls"][0] for d in said if "tool_calls" in d]
    assert calls[0] == {"index": 0, "id": "call00002", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert "".join(c["function"]["arguments"] for c in calls) == '{"a": "xy"}'
    assert delta_of(TextDelta("reasoning", "x")) == {"reasoning_content": "x"}
    assert parser.finish().to_openai(2)["tool_calls"][0]["id"] == "call00002"
