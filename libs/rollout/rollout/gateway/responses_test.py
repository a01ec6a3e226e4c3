"""The Responses API with the real openai client: token-exact, in any form in which a conversation comes back."""

import asyncio
import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from rollout.gateway.result import SessionRecord
from rollout.gateway.server import TokenGateway
from rollout.testing.gateway import ADD, CALL, TURNS, Script, check, client, decode, encode, serve

FUNCTION: Any = ADD["function"]
TOOL = {"type": "function", **FUNCTION, "strict": True}
THOUGHT = "<think>\nSum.\n</think>\n\nLet me add." + CALL + "<|im_end|>"


async def created(api: openai.AsyncOpenAI, stream: bool, **options: Any) -> Response:
    """Return a response; of a stream the one that its last event has, after a look at all of them."""
    asked: Any = {"model": "policy", "tools": [TOOL], **options}
    if not stream:
        return await api.responses.create(**asked)
    events = [event async for event in await api.responses.create(**asked, stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    last: Any = events[-1]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.to_dict() for item in done] == [item.to_dict() for item in last.response.output]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.response.output_text
    response: Response = last.response
    return response


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("back", ["items", "models", "previous"])
@pytest.mark.parametrize("first", [THOUGHT, CALL + "<|im_end|>", CALL + CALL + "<|im_end|>"])
def test_an_agent_goes_on_from_its_own_tokens(stream: bool, back: str, first: str) -> None:
    engine = Script(first, "It is 95.<|im_end|>", "Bye<|im_end|>")

    async def agent(gateway: TokenGateway) -> SessionRecord:
        async with client(gateway) as api:
            given: list[Any] = [{"role": "user", "content": "37+58="}]
            before: dict[str, Any] = {}
            for turn in range(3):
                answer = await created(api, stream, input=given, instructions="Add.", **before)
                assert answer.status == "completed"
                calls = [item for item in answer.output if item.type == "function_call"]
                assert len(calls) == (first.count("<tool_call>") if turn == 0 else 0)
                assert all(json.loads(call.arguments) == {"a": 37, "b": 58} for call in calls)
                new: list[Any] = [{"type": "function_call_output", "call_id": c.call_id, "output": "95"} for c in calls]
                new = new or [{"role": "user", "content": [{"type": "input_text", "text": "thanks"}]}]
                if back == "previous":
                    given, before = new, {"previous_response_id": answer.id}
                else:
                    given += [*(answer.output if back == "models" else [i.to_dict() for i in answer.output]), *new]
        return gateway.session("s")

    session = serve(engine, agent)
    (segment,) = session.segments
    check(segment)
    sampled = encode("".join(engine.texts))
    assert [i for i, mask in zip(segment.ids, segment.loss_mask, strict=True) if mask] == sampled
    for prompt, text in zip(engine.prompts, engine.texts, strict=True):
        assert list(segment.ids[: len(prompt) + len(encode(text))]) == prompt + encode(text)
    assert decode(segment.ids).count("<tool_response>\n95\n</tool_response>") == first.count("<tool_call>")
    assert decode(segment.ids).startswith("<|im_start|>system")
    assert session.turns == 3


def test_both_apis_find_the_same_conversation() -> None:
    engine = Script("One.<|im_end|>", "Two.<|im_end|>")

    async def agent(gateway: TokenGateway) -> SessionRecord:
        async with client(gateway) as api:
            first = await api.responses.create(model="policy", input="Count.")
            said = {"role": "assistant", "content": first.output_text}
            messages: Any = [{"role": "user", "content": "Count."}, said, {"role": "user", "content": "On."}]
            await api.chat.completions.create(model="policy", messages=messages)
        return gateway.session("s")

    assert len(serve(engine, agent).segments) == 1


@pytest.mark.parametrize("text", TURNS)
@pytest.mark.parametrize("stream", [False, True])
def test_turns_of_every_kind_come_back(text: str, stream: bool) -> None:
    engine = Script(text, "Well.<|im_end|>")

    async def agent(gateway: TokenGateway) -> SessionRecord:
        async with client(gateway) as api:
            given: list[Any] = [{"role": "user", "content": "37+58="}]
            answer = await created(api, stream, input=given)
            calls = [item for item in answer.output if item.type == "function_call"]
            given += answer.output
            given += [{"type": "function_call_output", "call_id": c.call_id, "output": "95"} for c in calls]
            await created(api, stream, input=[*given, {"role": "user", "content": "And?"}])
        return gateway.session("s")

    session = serve(engine, agent)
    assert len(session.segments) == 1
    check(session.segments[0])


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_limit_cut_off_is_incomplete(stream: bool) -> None:
    async def agent(gateway: TokenGateway) -> Response:
        async with client(gateway) as api:
            return await created(api, stream, input="Hi", max_output_tokens=2)

    answer = serve(Script("one two three four<|im_end|>"), agent)
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert answer.usage.output_tokens == 2


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]}, "messages[0].tool_call_id"),
        ({"input": 5}, "input"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"instructions": ["x"]}, "instructions"),
        ({"store": "yes"}, "store"),
        ({"temperature": 1000}, "temperature"),
    ],
)  # fmt: skip
def test_what_is_refused(asked: dict[str, Any], param: str) -> None:
    async def agent(gateway: TokenGateway) -> str | None:
        async with client(gateway) as api:
            with pytest.raises(openai.BadRequestError) as refused:
                await api.responses.create(**{"model": "policy", "input": "Hi", **asked})
        param: str | None = refused.value.param
        return param

    assert serve(Script("x<|im_end|>"), agent) == param


@pytest.mark.filterwarnings("ignore:agents send:RuntimeWarning")
def test_what_is_ignored_is_named() -> None:
    asked: Any = {
        "reasoning": {"effort": "low"}, "text": {"verbosity": "low"}, "include": ["reasoning.encrypted_content"],
        "metadata": {"a": "b"}, "truncation": "auto", "tools": [TOOL], "service_tier": "auto", "user": None,
    }  # fmt: skip

    async def agent(gateway: TokenGateway) -> str:
        async with client(gateway) as api:
            raw = await api.responses.with_raw_response.create(model="policy", input="Hi", **asked)
            plain = await api.responses.with_raw_response.create(
                model="policy", input="Hi", truncation="disabled", text={"format": {"type": "text"}}
            )
        assert "x-ignored" not in plain.headers
        ignored: str = raw.headers["x-ignored"]
        return ignored

    told = set(serve(Script("x<|im_end|>"), agent).split(", "))
    assert told == {"reasoning", "text", "include", "metadata", "truncation", "service_tier", "tools.strict"}


def test_a_response_that_was_not_stored_or_failed_is_not_known() -> None:
    async def agent(gateway: TokenGateway) -> None:
        async with client(gateway) as api:
            answer = await api.responses.create(model="policy", input="Hi", store=False)
            with pytest.raises(openai.BadRequestError, match="not stored"):
                await api.responses.create(model="policy", input="On", previous_response_id=answer.id)
            kept = await api.responses.create(model="policy", input="Hi")
        async with client(gateway, "other") as api:
            with pytest.raises(openai.BadRequestError, match="no response"):
                await api.responses.create(model="policy", input="On", previous_response_id=kept.id)

    serve(Script("x<|im_end|>"), agent)


def test_an_error_in_a_stream_reaches_the_client() -> None:
    class Failing(Script):
        """An engine that fails after its first tokens."""

        async def generate(self, *arguments: Any, **options: Any) -> Any:
            options["on_tokens"](encode("Hello you"), [0.0] * len(encode("Hello you")))
            await asyncio.sleep(0.1)
            raise ValueError("the prompt is too long")

    async def agent(gateway: TokenGateway) -> None:
        async with client(gateway) as api:
            with pytest.raises(openai.APIError, match="too long"):
                [event async for event in await api.responses.create(model="policy", input="Hi", stream=True)]

    serve(Failing("x"), agent)
