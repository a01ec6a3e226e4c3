"""Structured outputs by the openai client: whole answers, streams, choices, the Responses API, and what is refused."""

import json
from collections.abc import Sequence
from typing import Any

import jsonschema
import openai
import pydantic
import pytest

from rollout.engine import Sampling
from rollout.gateway.response_format_test import FORM, SCHEMA, engine_of
from rollout.gateway.server import TokenGateway
from rollout.native.engine import NativeEngine
from rollout.testing.gateway import ADD, QUESTION, Script, client, serve
from rollout.testing.model import tiny_model

SAMPLING = Sampling(max_new_tokens=150, seed=1)


class Person(pydantic.BaseModel):
    """What the client reads an answer as."""

    model_config = pydantic.ConfigDict(extra="forbid")
    married: bool
    children: list[bool] = pydantic.Field(max_length=2)


def assert_sampled_from_the_grammar(gateway: TokenGateway) -> None:
    segments = gateway.session("s").segments
    assert any(0 in segment.log_probs[at:] for segment in segments for at in [segment.loss_mask.index(True)])


def test_a_class_is_parsed_and_choices_and_streams_are_instances() -> None:
    async def agent(gateway: TokenGateway) -> None:
        messages: Any = [QUESTION]
        async with client(gateway) as api:
            parsed = await api.chat.completions.parse(model="policy", messages=messages, response_format=Person)
            assert isinstance(parsed.choices[0].message.parsed, Person)
            form: Any = FORM
            four = await api.chat.completions.create(model="policy", messages=messages, response_format=form, n=4)
            for choice in four.choices:
                assert choice.finish_reason == "stop"
                jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
            assert len({choice.message.content for choice in four.choices}) > 1
            chunks = await api.chat.completions.create(
                model="policy", messages=messages, response_format=form, stream=True
            )
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])
            jsonschema.validate(json.loads(text), SCHEMA)
            free = await api.chat.completions.create(model="policy", messages=messages)
            with pytest.raises(ValueError, match="char"):
                json.loads(free.choices[0].message.content or "x")
        assert_sampled_from_the_grammar(gateway)

    serve(engine_of(), agent, sampling=SAMPLING)


def test_objects_expressions_and_the_responses_api() -> None:
    async def agent(gateway: TokenGateway) -> None:
        messages: Any = [QUESTION]
        async with client(gateway) as api:
            for _ in range(6):
                done = await api.chat.completions.create(
                    model="policy", messages=messages, response_format={"type": "json_object"}
                )
                if done.choices[0].finish_reason == "stop":
                    assert isinstance(json.loads(done.choices[0].message.content or ""), dict)
            choice = await api.chat.completions.create(
                model="policy", messages=messages, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
            )
            assert choice.choices[0].message.content in ("yes", "no")
            response = await api.responses.parse(model="policy", input="Who?", text_format=Person)
            assert isinstance(response.output_parsed, Person)

    serve(engine_of(), agent, sampling=SAMPLING)


@pytest.mark.filterwarnings("ignore:agents send:RuntimeWarning")
def test_what_is_ignored_is_named_and_what_cannot_be_is_refused() -> None:
    asked: Any = {"messages": [QUESTION], "model": "policy", "response_format": FORM}

    async def told(gateway: TokenGateway) -> Sequence[str | None]:
        async with client(gateway) as api:
            raw = await api.chat.completions.with_raw_response.create(**asked)
            tools = await api.chat.completions.with_raw_response.create(**asked, tools=[ADD])
        return raw.headers.get("x-ignored"), tools.headers.get("x-ignored")

    script = Script("x<|im_end|>")
    assert serve(script, told, own_sampling=True) == ("response_format", "response_format")
    assert not any(sampling.structured_outputs for sampling in script.samplings)

    async def refused(gateway: TokenGateway) -> str:
        async with client(gateway) as api:
            with pytest.raises(openai.BadRequestError) as error:
                await api.chat.completions.create(**asked)
        return f"{error.value.param}: {error.value.message}"

    assert "response_format: " in (found := serve(NativeEngine(tiny_model(300)), refused))
    assert "NativeEngine(tokenizer=...)" in found
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}
    asked["response_format"] = form
    assert 'Unimplemented keys: ["not"]' in serve(engine_of(), refused)
