"""What others say through the chat templates of real models (TRL's wheel): nothing they say is a control token (R5).

Which templates can carry on a conversation with tool results is listed here, so that one that stops doing so is seen.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from chat_tools.conformance.real_templates import family_of, real_tokenizer, template_names
from rollout.chat.chat import Chat
from rollout.chat.messages import Reply
from rollout.testing.chat import tiny_tokenizer
from rollout.tools.tool import Tool, ToolCall, ToolResult, call_id

QUESTION = [{"role": "user", "content": "what is the weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = Tool("get_weather", "Tells the weather.", SCHEMA, lambda city: "sunny")
NO_TOOL_MESSAGES = {
    "cohere", "cohere_training", "gemma", "gemma_training", "gemma3", "gemma3_training",  # roles must alternate
    "glm4moe", "glm4moe_training", "gptoss", "gptoss_training", "qwen3",  # rewrite earlier turns
    "llava_next", "llava_next_training",  # want lists of parts
}  # fmt: skip
NAMES = ("diffusion_gemma", "gemma4", "gemma4_v3", "gemma4_v5", "muse_glimmer")  # write the name beside the result


def forgeries(tokenizer: Any) -> str:
    return "".join(str(token.content) for token in tokenizer.added_tokens_decoder.values())


def chat_of(name: str) -> Chat:
    family = family_of(name)
    return Chat(real_tokenizer(name), end_of_turn=(family.closings or family.stops)[0])


def controls(chat: Chat, ids: Sequence[int]) -> list[int]:
    special = set(chat.tokenizer.added_tokens_decoder)
    return [index for index in ids if index in special]


def result(content: str, number: int = 0) -> dict[str, str]:
    return ToolResult("get_weather", content, True, call_id(number)).to_message()


@pytest.mark.parametrize("name", template_names())
def test_others_forge_nothing_through_a_real_template(name: str) -> None:
    chat = chat_of(name)
    forged = forgeries(chat.tokenizer)
    parts = name.startswith("llava_next")

    def question(text: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "text", "text": text}] if parts else text}]

    assert controls(chat, chat.open(question(forged))) == controls(chat, chat.open(question("sunny")))
    if name in NO_TOOL_MESSAGES:
        with pytest.raises((ValueError, TypeError)):
            chat.after_turn([result("sunny")])
        return
    for hostile, harmless in (
        (result(forged), result("sunny")),
        (
            {**result("sunny"), "name": forged},
            {**result("sunny"), "name": "rain"},
        ),
    ):
        assert controls(chat, chat.after_turn([hostile])) == controls(chat, chat.after_turn([harmless]))


@pytest.mark.parametrize("name", NAMES)
def test_a_template_that_names_the_tool_has_its_name(name: str) -> None:
    chat = chat_of(name)
    text = chat.tokenizer.decode(chat.after_turn([result("sunny"), result("rain", 1)]))
    assert text.count("get_weather") >= 2
    assert text.index("sunny") < text.index("rain")


CHECKS_IDS = (
    "{%- macro check(id) %}{% if id is not defined or id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}{{ id }}"
    "{% endmacro -%}"
    "{%- for m in messages %}"
    "{%- if m.role == 'tool' %}[TOOL_RESULTS]{{ m.name }} {{ check(m.tool_call_id) }} {{ m.content }}[/TOOL_RESULTS]"
    "{%- elif m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}{{ c.function.name }} {{ check(c.id) }}{% endfor %}"
    "<|im_end|>{% elif m.role == 'assistant' %}{{ m.content }}<|im_end|>"
    "{%- else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)


def test_a_template_that_checks_ids_as_mistrals_do_gets_them() -> None:
    chat = Chat(tiny_tokenizer(CHECKS_IDS))
    following = chat.after_turn([result("sunny", 3), result("rain", 4)])
    wanted = ["get_weather call00003 sunny", "get_weather call00004 rain"]
    assert chat.tokenizer.decode(following) == "".join(f"[TOOL_RESULTS]{w}[/TOOL_RESULTS]" for w in wanted)
    text = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"
    ids = chat.tokenizer(text * 2, add_special_tokens=False)["input_ids"]
    reply: Reply = chat.read(ids, False, [WEATHER], calls_before=3)
    assert reply.tool_calls == tuple(ToolCall("get_weather", '{"city": "Paris"}', call_id(n)) for n in (3, 4))


def test_what_a_template_refuses_is_said_in_words() -> None:
    chat = Chat(tiny_tokenizer(CHECKS_IDS))
    with pytest.raises(ValueError, match="the chat template refuses these messages: Tool call IDs should be"):
        chat.after_turn([{"role": "tool", "name": "f", "tool_call_id": "short", "content": "x"}])
