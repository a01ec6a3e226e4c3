"""What follows a turn through the chat templates of real models (TRL's wheel): a stream goes on, or a new one begins.

The oracles: transformers' own rendering says whether what came before stays as it was, `chat_tools.extend` on a
rendered conversation says which tokens follow.
"""

from typing import Any

import pytest

from chat_tools.conformance.real_templates import family_of, real_tokenizer, template_names
from chat_tools.rendering.continuation import extend
from chat_tools.rendering.render import render
from rollout.chat.chat import Chat
from rollout.testing.chat import tiny_tokenizer
from rollout.tools.tool import Tool

WEATHER = Tool(
    "get_weather", "Tells it.", {"type": "object", "properties": {"city": {"type": "string"}}}, lambda city: "sunny"
)
# No tool messages: their templates want alternating roles, or parts.
REFUSE_TOOLS: tuple[str, ...] = (
    "cohere",
    "cohere_training",
    "gemma",
    "gemma3",
    "gemma_training",
    "gemma3_training",
    "idefics3",
)
REFUSE_TOOLS += ("idefics3_training", "llava_next", "llava_next_training", "smolvlm", "smolvlm_training")


def conversation(name: str, calls: bool, thinks: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A question, an answer, and what is said to it."""
    parts = name.startswith("llava_next")

    def text(words: str) -> Any:
        return [{"type": "text", "text": words}] if parts else words

    function = {"name": "get_weather", "arguments": {"city": "Paris"}}
    answer = {"role": "assistant", "content": text("" if calls else "it is sunny")}
    if calls:
        answer["tool_calls"] = [{"type": "function", "id": "call00000", "function": function}]
    if thinks:
        answer["reasoning_content"] = "hmm let me see"
    result = {"role": "tool", "name": "get_weather", "tool_call_id": "call00000", "content": text("so sunny")}
    asked = [{"role": "user", "content": text("what is the weather?")}, answer]
    return asked, [result if calls else {"role": "user", "content": text("and now?")}]


def stock(tokenizer: Any, messages: list[dict[str, Any]], prompt: bool) -> str:
    """Transformers' own text; arguments as text for the template that wants them so."""
    options = {"tools": [WEATHER.schema], "tokenize": False, "add_generation_prompt": prompt}
    try:
        return str(tokenizer.apply_chat_template(messages, **options))
    except TypeError:
        call: dict[str, Any] = {"type": "function", "id": "call00000"}
        call["function"] = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
        said = [{**m, "tool_calls": [call]} if "tool_calls" in m else m for m in messages]
        return str(tokenizer.apply_chat_template(said, **options))


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("calls", [False, True])
@pytest.mark.parametrize("name", template_names())
def test_a_stream_goes_on_where_the_template_keeps_what_was_said(name: str, calls: bool, thinks: bool) -> None:
    tokenizer, family = real_tokenizer(name), family_of(name)
    chat = Chat(tokenizer, stop_tokens=family.stops)
    said, new = conversation(name, calls, thinks)
    if calls and name in REFUSE_TOOLS:
        with pytest.raises(ValueError, match="the chat template refuses these messages"):
            chat.follow(said, new, [WEATHER], chat.stop_ids[0])
        return
    before, after = stock(tokenizer, said, False), stock(tokenizer, [*said, *new], True)
    if calls and "Paris" not in before:
        return  # the template never writes calls: nothing is promised of tools there
    last = before.rfind("Paris") + 5 if calls else before.rfind("it is sunny") + 11
    kept = after.startswith(before[:last])
    for stop in (*family.stops, ""):  # the last: a limit cut the turn off
        following = chat.follow(said, new, [WEATHER], tokenizer.convert_tokens_to_ids(stop) if stop else None)
        assert (following is not None) == kept, stop
        if following is None:
            continue
        opened = render(tokenizer, said[:1], [WEATHER.schema], add_generation_prompt=True, stop_tokens=family.stops)
        sampled = tokenizer("anything " + stop, add_special_tokens=False)["input_ids"]
        try:
            turn = opened.generated(sampled, said[1])
            expected = extend(turn, new).ids[len(turn.ids) :]
        except (TypeError, ValueError):  # arguments must be text there; or extend finds no proof
            continue
        assert following == expected, stop


def test_what_goes_on_and_what_begins_anew() -> None:
    """The templates people meet, by name; GLM, gpt-oss and Gemma 4 were refused before."""

    def kept(name: str, calls: bool, thinks: bool) -> bool:
        said, new = conversation(name, calls, thinks)
        chat = Chat(real_tokenizer(name), stop_tokens=family_of(name).stops)
        return chat.follow(said, new, [WEATHER], chat.stop_ids[0]) is not None

    for name in ("glm4moe", "gptoss", "gemma4", "llama3", "qwen2_5", "qwen3_5_think", "qwen3_training", "qwen3_8"):
        assert kept(name, calls=True, thinks=True), name
    for name in ("qwen3", "qwen3_5_think", "glm4moe", "gptoss", "nemotron_3_nano"):
        assert not kept(name, calls=False, thinks=True), name  # a user speaks: the thinking is forgotten


@pytest.mark.parametrize("name", ["qwen3_training", "glm4moe", "gptoss", "gemma4", "llama3"])
def test_a_turn_that_a_limit_cut_off_is_closed_first(name: str) -> None:
    tokenizer = real_tokenizer(name)
    chat = Chat(tokenizer, stop_tokens=family_of(name).stops)
    said, new = conversation(name, calls=False, thinks=False)
    closed, cut = (tokenizer.decode(chat.follow(said, new, [WEATHER], stop)) for stop in (chat.end_of_turn_id, None))
    assert cut.endswith(closed)
    assert len(cut) >= len(closed)


def test_another_stop_than_the_models_is_followed_by_the_templates_own() -> None:
    tokenizer = tiny_tokenizer()
    chat = Chat(tokenizer, "<|im_end|>")
    said, new = conversation("tiny", calls=False, thinks=False)
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    tail = chat.follow(said, new, (), chat.end_of_turn_id)
    assert tail is not None
    assert chat.follow(said, new, (), other) == [chat.end_of_turn_id, *tail]
    both = Chat(tokenizer, "<|im_end|>", stop_tokens=["<|im_end|>", other])
    assert both.stop_ids == (chat.end_of_turn_id, other)
    assert both.follow(said, new, (), other) == tail


def test_stop_tokens_are_checked() -> None:
    with pytest.raises(ValueError, match="single token"):
        Chat(tiny_tokenizer(), end_of_turn="the end")
    with pytest.raises(ValueError, match="not one token"):
        Chat(tiny_tokenizer(), stop_tokens=["the end"])
    with pytest.raises(ValueError, match="unknown tool-call format"):
        Chat(tiny_tokenizer(), tool_format="qwen-of-old")
