"""Structured outputs of requests: which forms mean what, which are refused; answers against json and jsonschema."""

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any

import jsonschema
import pytest
import torch

from rollout.chat.chat import Chat
from rollout.chat.conversation import Conversation
from rollout.engine import Completion, PauseMode, Sampling
from rollout.gateway.chat_request import ChatRequest, RequestError, read_request
from rollout.gateway.choice_task import sample
from rollout.gateway.responses_request import read_responses_request
from rollout.native.engine import NativeEngine
from rollout.structured_outputs import StructuredOutputs
from rollout.testing.chat import TEMPLATE, tiny_tokenizer
from rollout.testing.model import tiny_model

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": SCHEMA}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def read(**parameters: Any) -> ChatRequest:
    return read_request({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **parameters}, "m")


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
        ({"response_format": FORM}, StructuredOutputs(json=json.dumps(SCHEMA))),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=json.dumps(SCHEMA))),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, StructuredOutputs(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, StructuredOutputs(grammar='root ::= "a"')),
        (
            {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}},
            StructuredOutputs(json_object=True, disable_any_whitespace=True),
        ),
    ],
)
def test_what_a_request_means(asked: Mapping[str, Any], wanted: StructuredOutputs) -> None:
    request = read(**asked)
    assert request.ignored == ()
    assert request.sampling(Sampling()).structured_outputs == wanted
    cold = read(temperature=0, **asked).sampling(Sampling())
    assert cold.greedy
    assert cold.structured_outputs == wanted


def test_a_session_has_its_own_where_a_request_names_none() -> None:
    default = Sampling(structured_outputs=StructuredOutputs(regex="a+"))
    for asked in ({}, {"response_format": {"type": "text"}}, {"temperature": 0}):
        assert read(**asked).sampling(default).structured_outputs == default.structured_outputs


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": "json"}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "schema must"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "depth": 3}}},
            "response_format",
            "depth is not supported",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "one of json"),
        ({"structured_outputs": ["a"]}, "structured_outputs", "one of json"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "structural_tag is not supported"),
        ({"structured_outputs": {"num_read": 3, "regex": "a"}}, "structured_outputs", "num_read is not supported"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "one kind"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "text of a JSON schema"),
        ({"structured_outputs": {"json_object": 1}}, "structured_outputs", "true or false"),
        ({"structured_outputs": {"regex": "a"}, "response_format": FORM}, "structured_outputs", "both"),
        ({"response_format": FORM, "stop": ["}"]}, "stop", "before it is whole"),
        ({"guided_json": SCHEMA}, "guided_json", "not supported"),
    ],
)
def test_other_forms_are_refused_by_name(asked: Mapping[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as refused:
        read(**asked)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_beside_tools_that_may_be_called_a_format_is_named_as_ignored() -> None:
    request = read(response_format=FORM, tools=[TOOL])
    assert request.ignored == ("response_format",)
    assert not request.sampling(Sampling()).structured_outputs
    assert read(response_format=FORM, tools=[TOOL], tool_choice="none").ignored == ()


def test_the_responses_api_has_the_same_formats() -> None:
    def wanted(text: Mapping[str, Any]) -> tuple[StructuredOutputs, tuple[str, ...]]:
        chat = read_responses_request({"model": "m", "input": "Hi", "text": text}, "m", {}).chat
        return chat.sampling(Sampling()).structured_outputs, chat.ignored

    flat = {"type": "json_schema", "name": "person", "strict": True, "schema": SCHEMA}
    assert wanted({"format": flat}) == (StructuredOutputs(json=json.dumps(SCHEMA)), ())
    assert wanted({"format": {"type": "json_object"}, "verbosity": "low"}) == (
        StructuredOutputs(json_object=True),
        ("text",),
    )
    assert wanted({"format": {"type": "text"}}) == (StructuredOutputs(), ())
    with pytest.raises(RequestError, match="response_format is one of"):
        wanted({"format": {"type": "xml"}})


def engine_of(**options: Any) -> NativeEngine:
    tokenizer = tiny_tokenizer()
    model = tiny_model(len(tokenizer), max_position_embeddings=1024)
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
    return NativeEngine(model, tokenizer=tokenizer, **options)


def test_conversations_end_as_their_texts_do_and_go_on() -> None:
    """Turn after turn, of one stream: each reply is whole, and the tokens are those that were sampled."""
    chat, schema = Chat(tiny_tokenizer()), StructuredOutputs(json=json.dumps(SCHEMA), disable_any_whitespace=True)

    async def play(seed: int) -> None:
        sampling = Sampling(max_new_tokens=60, seed=seed, structured_outputs=schema)
        talk = Conversation(engine, chat, sampling, [{"role": "user", "content": "Who?"}])
        for turn in range(3):
            reply = await talk.reply()
            assert (turn, talk.stop_reason) == (turn, "stop")
            jsonschema.validate(json.loads(reply.content), SCHEMA)
            assert talk.add_messages([{"role": "user", "content": "And?"}])
        assert len(talk.segments) == 1

    async def all_of() -> None:
        await asyncio.gather(*[play(seed) for seed in range(8)])

    engine = engine_of()
    asyncio.run(all_of())


def test_a_template_that_begins_with_thinking_is_refused() -> None:
    chat = Chat(tiny_tokenizer(TEMPLATE.replace("if think", "if true")))
    sampling = Sampling(structured_outputs=StructuredOutputs(regex="a"))
    with pytest.raises(ValueError, match="enable_thinking"):
        Conversation(engine_of(), chat, sampling, [{"role": "user", "content": "Hi"}])


def test_an_answer_that_is_broken_off_goes_on_within_its_grammar() -> None:
    chat, engine = Chat(tiny_tokenizer()), engine_of()
    pattern = "(ab|xyz|12){20,30}"
    sampling = Sampling(
        max_new_tokens=200, seed=3, stop_token_ids=chat.stop_ids, structured_outputs=StructuredOutputs(regex=pattern)
    )
    abort: PauseMode = "abort"

    async def play() -> Completion:
        job = asyncio.create_task(
            sample(engine, chat.open([{"role": "user", "content": "Hi"}]), sampling, None, "r", None)
        )
        for wait in (5, 20):
            while engine.decode_steps < wait:
                await asyncio.sleep(0)
            await engine.pause(abort)
            await engine.resume()
        return await job

    done = asyncio.run(play())
    assert done.stop_reason == "stop"
    assert re.fullmatch(pattern, chat.decode(done.ids[:-1]))
