"""Each parameter of the openai package is honoured, accepted and told, or refused by its name: none is passed over."""

from collections.abc import Mapping
from typing import Any

import pytest
from openai.types.chat import completion_create_params as completions
from openai.types.responses import response_create_params as responses

from rollout.gateway.chat_request import ChatRequest, RequestError, read_request
from rollout.gateway.responses_request import read_responses_request

USER = {"role": "user", "content": "hi"}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}

CHAT: Mapping[str, Mapping[str, Any]] = {
    "honoured": {
        "model": "policy",
        "messages": [USER, USER],
        "tools": [CHAT_TOOL],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 2,
        "stop": ["end"],
        "logprobs": True,
        "max_tokens": 5,
        "max_completion_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.5,
        "seed": 3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
    },
    "told": {
        "user": "me",
        "safety_identifier": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "flex",
        "prompt_cache_key": "key",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"ttl": "30m"},
        "reasoning_effort": "low",
        "verbosity": "low",
        "prediction": {"type": "content", "content": "x"},
    },
    "refused": {
        "audio": {"voice": "alloy", "format": "wav"},
        "function_call": "auto",
        "functions": [{"name": "f"}],
        "logit_bias": {"1": 5},
        "modalities": ["text", "audio"],
        "moderation": {"model": "m"},
        "top_logprobs": 5,
        "web_search_options": {},
    },
    "structured": {"response_format": SCHEMA},
}
RESPONSES: Mapping[str, Mapping[str, Any]] = {
    "honoured": {
        "model": "policy",
        "input": [USER, USER],
        "instructions": "be short",
        "tools": [TOOL],
        "tool_choice": "none",
        "parallel_tool_calls": False,
        "stream": True,
        "max_output_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.5,
        "store": False,
        "previous_response_id": "r1",
    },
    "told": {
        "user": "me",
        "safety_identifier": "me",
        "metadata": {"a": "b"},
        "service_tier": "flex",
        "prompt_cache_key": "key",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"ttl": "30m"},
        "reasoning": {"effort": "low"},
        "truncation": "auto",
        "stream_options": {"include_obfuscation": False},
        "include": ["reasoning.encrypted_content"],
    },
    "refused": {
        "background": True,
        "context_management": [{"type": "compaction"}],
        "conversation": "c1",
        "max_tool_calls": 3,
        "moderation": {"model": "m"},
        "prompt": {"id": "p"},
        "top_logprobs": 5,
    },
    "structured": {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
}
TABLES = {"chat": CHAT, "responses": RESPONSES}


def fields(kind: str) -> set[str]:
    """Return the parameters of the package's own types, those of streams too."""
    module: Any = completions if kind == "chat" else responses
    name = "CompletionCreateParams" if kind == "chat" else "ResponseCreateParams"
    return {field for part in ("Base", "Streaming") for field in getattr(module, name + part).__annotations__}


def read(kind: str, name: str | None = None) -> Any:
    """Read a request with one parameter more, and what it needs."""
    extra = {key: value for row in TABLES[kind].values() for key, value in row.items() if key == name}
    if kind == "chat" and name == "stream_options":
        extra["stream"] = True
    if kind == "chat":
        return read_request({"model": "policy", "messages": [USER], **extra}, "policy")
    return read_responses_request({"model": "policy", "input": [USER], **extra}, "policy", {"r1": [USER]})


def ignored(kind: str, request: Any) -> tuple[str, ...]:
    chat: ChatRequest = request if kind == "chat" else request.chat
    return chat.ignored


@pytest.mark.parametrize("kind", TABLES)
def test_the_table_has_each_parameter_of_the_package_once(kind: str) -> None:
    names = [name for row in TABLES[kind].values() for name in row]
    assert sorted(names) == sorted(fields(kind))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, rows in TABLES.items() for name in rows["refused"]])
def test_what_has_no_meaning_here_is_refused_by_name(kind: str, name: str) -> None:
    with pytest.raises(RequestError) as refused:
        read(kind, name)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, name, "unsupported_parameter")


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, rows in TABLES.items() for name in rows["told"]])
def test_what_is_accepted_without_effect_is_told(kind: str, name: str) -> None:
    assert ignored(kind, read(kind, name)) == (name,)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, rows in TABLES.items() for name in rows["honoured"]])
def test_what_is_honoured_changes_the_request(kind: str, name: str) -> None:
    request = read(kind, name)
    assert ignored(kind, request) == ()
    assert name == "model" or request != read(kind)


@pytest.mark.parametrize("kind", TABLES)
def test_a_form_of_the_answer_is_honoured_or_told(kind: str) -> None:
    (name,) = TABLES[kind]["structured"]
    request = read(kind, name)
    assert ignored(kind, request) == (name,) or (ignored(kind, request) == () and request != read(kind))
