"""What a request may say: each thing that has no effect is refused by its name, and nothing crashes the reader."""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.engine import Sampling
from rollout.gateway.chat_request import IDENTITY_VALUES, ChatRequest, RequestError, read_json, read_request

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
ASKED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}


def body(**changes: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [USER]} | changes


def refused(given: Any, match: str) -> RequestError:
    with pytest.raises(RequestError, match=match) as caught:
        read_request(given, "policy")
    assert 400 <= caught.value.status < 500
    return caught.value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logit_bias", {"1": 5}),
        ("top_logprobs", 5),
        ("tool_choice", "sometimes"),
        ("tool_choice", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
        ("functions", []),
        ("unheard_of", 0),
        ("chat_template_kwargs", {"enable_thinking": False}),
    ],
)
def test_a_parameter_without_effect_is_refused_by_name(name: str, value: Any) -> None:
    refusal = refused(body(**{name: value}), name)
    assert (refusal.status, refusal.param, refusal.code) == (400, name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("asked", "ignored"),
    [
        ({"user": "me", "metadata": {"a": "b"}, "store": True}, ("user", "metadata", "store")),
        ({"store": False, "metadata": {}, "response_format": {"type": "text"}}, ()),
        ({"response_format": {"type": "json_object"}, "reasoning_effort": "low"}, ("reasoning_effort",)),
        ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, ("response_format",)),
        ({"tools": [TOOL | {"function": TOOL["function"] | {"strict": True}}]}, ("tools.strict",)),
        ({"messages": [USER | {"name": "me"}]}, ("messages.name",)),
    ],
)
def test_what_frameworks_send_unasked_is_accepted_and_told(asked: dict[str, Any], ignored: tuple[str, ...]) -> None:
    assert read_request(body(**asked), "policy").ignored == ignored


def test_a_developer_is_the_system_and_calls_may_be_single() -> None:
    request = read_request(
        body(messages=[{"role": "developer", "content": "x"}, USER], parallel_tool_calls=False), "policy"
    )
    assert request.messages[0] == {"role": "system", "content": "x"}
    assert [read_request(body(), "policy").parallel_calls, request.parallel_calls] == [True, False]


@pytest.mark.parametrize("name", sorted(IDENTITY_VALUES))
def test_neutral_values_and_null_are_accepted(name: str) -> None:
    for value in (*IDENTITY_VALUES[name], None):
        assert read_request(body(**{name: value}), "policy") == read_request(body(), "policy")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 1.5}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": "x"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 129}, "n"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {}}, "tools": [TOOL]}, "tool_choice.function.name"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"logprobs": 1}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options"),
        ({"model": 3}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": "x", "images": ["x"]}]}, "messages[0].images"),
        ({"messages": [USER, {"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "x"}]}, USER]}, "messages[1].tool_calls[0]"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        (
            {"messages": [USER, ASKED, {"role": "tool", "tool_call_id": "c2", "content": "x"}]},
            "messages[2].tool_call_id",
        ),
        ({"messages": [USER, {"role": "assistant", "refusal": "no"}, USER]}, "messages[1].refusal"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "examples": [1]}}]}, "tools[0].function.examples"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], param: str) -> None:
    assert refused(body(**changes), ".").param == param


def test_another_model_is_not_found() -> None:
    refusal = refused(body(model="gpt"), "'gpt'.*'policy'")
    assert (refusal.status, refusal.code) == (404, "model_not_found")


def test_messages_are_read_as_templates_want_them() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    answer = {"role": "tool", "tool_call_id": "c1", "content": "1"}
    returned = ASKED | {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    messages = read_request(body(messages=[parts, returned, answer]), "policy").messages
    assert messages == (
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c1", "name": "f"},
    )


def test_tools_keep_name_description_and_schema() -> None:
    (tool,) = read_request(body(tools=[TOOL | {"function": TOOL["function"] | {"strict": False}}]), "policy").tools
    assert tool.schema["function"] == TOOL["function"] | {"description": ""}
    with pytest.raises(NotImplementedError, match="agent runs its tools"):
        tool.run(a=1)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"nothing", b'{"a": NaN}', b'{"a": Infinity}', b'"\\ud800"', b"\xff", b"[" * 100_000]
)
def test_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(RequestError, match="not valid JSON") as caught:
        read_json(text)
    assert caught.value.body()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        (None, ("auto", None, True, False)),
        ("auto", ("auto", None, True, False)),
        ("none", ("none", None, False, False)),
        ("required", ("required", None, True, True)),
        ({"type": "function", "function": {"name": "f"}}, ("function", "f", True, True)),
    ],
)
def test_a_tool_choice_says_what_may_and_what_has_to_be_called(
    choice: Any, read: tuple[str, str | None, bool, bool]
) -> None:
    request = read_request(body(tools=[TOOL], tool_choice=choice), "policy")
    assert (request.tool_choice, request.function, request.may_call, request.forces_call) == read
    assert not read_request(body(), "policy").may_call


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["", "role", "\u00e9", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["", "role", "\u00e9", "text"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = [
    "messages",
    "tools",
    "stop",
    "temperature",
    "seed",
    "stream",
    "stream_options",
    "max_tokens",
    "tool_choice",
    "n",
]
MESSAGE = st.dictionaries(
    st.sampled_from(["role", "content", "tool_calls", "tool_call_id", "reasoning_content", "name"]),
    JSON | st.sampled_from(["user", "assistant", "tool"]),
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # nested JSON takes its time on a busy machine
@given(st.dictionaries(st.sampled_from(FIELDS), JSON), st.lists(MESSAGE, max_size=3) | JSON, st.binary(max_size=20))
def test_any_body_is_read_or_refused(changes: dict[str, Any], messages: Any, raw: bytes) -> None:
    for given_body in (body(**changes), body(messages=messages)):
        try:
            request = read_request(read_json(json.dumps(given_body).encode()), "policy")
        except RequestError as refusal:
            json.dumps(refusal.body())
        else:
            assert request.messages[-1]["role"] != "assistant"
    with contextlib.suppress(RequestError):
        read_json(raw)


@given(
    st.sampled_from([Sampling(), Sampling(temperature=0.5, top_k=3, seed=1), Sampling(greedy=True)]),
    st.fixed_dictionaries(
        {}, optional={"temperature": st.floats(0, 3), "top_p": st.floats(0.01, 1), "seed": st.integers(0, 9)}
    ),
)
def test_settings_lie_over_the_defaults(default: Sampling, named: dict[str, Any]) -> None:
    sampling = ChatRequest("policy", (), (), named).sampling(default)
    if named.get("temperature") == 0:
        assert sampling.greedy
    for name, value in named.items():
        assert sampling.greedy or getattr(sampling, name) == value
    if not named:
        assert sampling == default
