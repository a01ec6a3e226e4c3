"""tool_choice: a call is forced by its beginning, which is given and not trained; what can't be forced is refused."""

import json
from typing import Any

import openai
import pytest

from rollout.chat.chat import Chat
from rollout.chat.segment import Segment
from rollout.gateway.forced_call import forced_call
from rollout.gateway.server import TokenGateway
from rollout.testing.chat import TEMPLATE, tiny_tokenizer
from rollout.testing.gateway import ADD, QUESTION, Script, ask, check, client, decode, encode, serve, user
from rollout.tools.tool import Tool

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}
ADDS = Tool("add", "", OBJECT, print)
TIMES = {"type": "function", "function": {"name": "times", "description": "", "parameters": OBJECT}}
NAMED = {"type": "function", "function": {"name": "add"}}
REST = ">\n<parameter=a>\n37\n</parameter>\n</function>\n</tool_call><|im_end|>"


@pytest.mark.parametrize(
    ("choice", "tools", "given", "sampled", "reason"),
    [
        (NAMED, [ADD, TIMES], "<tool_call>\n<function=add>\n", REST[2:], "stop"),
        ("required", [ADD, TIMES], "<tool_call>\n<function=", "times" + REST, "tool_calls"),
        ("required", [ADD], "<tool_call>\n<function=add>\n", REST[2:], "tool_calls"),
    ],
)
def test_a_forced_call_goes_on_from_the_tokens_it_was_given(
    choice: Any, tools: list[dict[str, Any]], given: str, sampled: str, reason: str
) -> None:
    engine = Script(sampled, "x<|im_end|>")

    async def agent(gateway: TokenGateway) -> tuple[Segment, ...]:
        async with client(gateway) as api:
            asked = {"model": "policy", "messages": [QUESTION], "tools": tools, "tool_choice": choice}
            answer = (await api.chat.completions.create(**asked)).choices[0]
            (call,) = answer.message.tool_calls
            assert call.function.name == ("times" if "times" in sampled else "add")
            assert (json.loads(call.function.arguments), answer.finish_reason) == ({"a": 37}, reason)
            said = {"role": "tool", "tool_call_id": call.id, "content": "37"}
            await ask(api, QUESTION, answer.message, said, tools=tools)
        return gateway.session("s").segments

    (segment,) = serve(engine, agent)
    check(segment)
    assert decode(engine.prompts[0]).endswith("<|im_start|>assistant\n" + given)
    first = engine.prompts[0] + encode(sampled)
    assert engine.prompts[1][: len(first)] == first == list(segment.ids[: len(first)])
    assert sum(segment.loss_mask) == len(encode(sampled)) + len(encode("x<|im_end|>"))


def test_a_forced_call_that_the_model_spoils_is_content() -> None:
    async def agent(gateway: TokenGateway) -> None:
        async with client(gateway) as api:
            answer = await ask(api, QUESTION, tools=[ADD], tool_choice=NAMED)
            assert (answer.message.tool_calls, answer.finish_reason) == (None, "stop")
            assert answer.message.content == "never"

    serve(Script("never<|im_end|>"), agent)


def test_none_wants_no_call_and_the_conversation_goes_on() -> None:
    text = "<tool_call>\n<function=add" + REST
    engine = Script(text, "x<|im_end|>")

    async def agent(gateway: TokenGateway) -> tuple[Segment, ...]:
        async with client(gateway) as api:
            answer = await ask(api, QUESTION, tools=[ADD], tool_choice="none")
            assert (answer.message.tool_calls, answer.finish_reason) == (None, "stop")
            assert answer.message.content == text.removesuffix("<|im_end|>")
            await ask(api, QUESTION, answer.message, user("go on"), tools=[ADD])
        return gateway.session("s").segments

    (segment,) = serve(engine, agent)
    check(segment)
    assert "add" in decode(engine.prompts[0])  # the prompt is that of any other choice


@pytest.mark.parametrize(
    ("template", "tool_format", "why"),
    [
        (TEMPLATE, "hermes", "another format than hermes"),
        ("{% for m in messages %}{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}", "qwen3_xml", "another format"),
        (TEMPLATE.replace("if think }}", "}}"), "qwen3_xml", "another way than it asks"),
    ],
)
def test_what_cannot_be_forced_is_refused_with_the_reason(template: str, tool_format: str, why: str) -> None:
    chat = Chat(tiny_tokenizer(template), end_of_turn="<|im_end|>", tool_format=tool_format)
    with pytest.raises(ValueError, match=why):
        forced_call(chat, [ADDS], None)


def test_markers_that_the_tokenizer_spells_force_no_call() -> None:
    """The beginning is given as tokens, and a sampled turn is read by its tokens: spelled markers are text there."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "<function="]})
    chat = Chat(tokenizer, end_of_turn="<|im_end|>", tool_format="qwen3_xml")
    assert forced_call(chat, [ADDS], "add")
    tokenizer.split_special_tokens = True
    with pytest.raises(ValueError, match="another format than qwen3_xml"):
        forced_call(chat, [ADDS], "add")


def test_the_refusal_reaches_the_client() -> None:
    async def agent(gateway: TokenGateway) -> None:
        gateway.chat = Chat(tiny_tokenizer(), tool_format="hermes")
        async with client(gateway) as api:
            with pytest.raises(openai.BadRequestError, match="can't be enforced") as caught:
                await ask(api, QUESTION, tools=[ADD], tool_choice="required")
            assert (caught.value.param, caught.value.code) == ("tool_choice", "unsupported_parameter")
            assert gateway.session("s").turns == 0

    serve(Script("x"), agent)
