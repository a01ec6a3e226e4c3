"""The chat seam against chat_tools' own rendering: the same tokens, found faster."""

import pytest

from chat_tools.parsing.parser import parse
from chat_tools.rendering.render import extend, render
from rollout.arithmetic import calculator
from rollout.chat import Chat
from rollout.testing_chat import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CALL = "<tool_call>\n<function=calculator>\n<parameter=expression>\n37+58\n</parameter>\n</function>\n</tool_call>"
QUESTION = [{"role": "user", "content": "37+58="}]


def encode(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("tools", [(), (calculator(),)])
@pytest.mark.parametrize("think", [False, True])
def test_an_opening_is_chat_tools_render(tools, think):
    chat = Chat(TOKENIZER, think=think)
    expected = render(TOKENIZER, QUESTION, [t.schema for t in tools] or None, add_generation_prompt=True, think=think)
    assert chat.open(QUESTION, tools) == expected.ids
    assert chat.open(QUESTION, tools) == expected.ids  # from memory


@pytest.mark.parametrize(
    ("turn", "following"),
    [
        (CALL, [{"role": "tool", "content": "95"}]),
        (CALL + "\n" + CALL, [{"role": "tool", "content": "95"}, {"role": "tool", "content": "Error: <|im_end|> y"}]),
        ("95", [{"role": "user", "content": "and <tool_call> now?\n"}]),
        (CALL, [{"role": "tool", "content": "95"}, {"role": "user", "content": "go on"}]),
    ],
)
@pytest.mark.parametrize("think", [False, True])
def test_what_follows_a_turn_is_chat_tools_extend(turn, following, think):
    opened = render(TOKENIZER, QUESTION, [calculator().schema], add_generation_prompt=True, think=think)
    ids = encode(turn + "<|im_end|>")
    said = opened.generated(ids, parse(turn, "qwen3_xml").to_message())
    expected = extend(said, following).ids[len(said.ids) :]
    assert Chat(TOKENIZER, think=think).after_turn(following) == expected


def test_memory_is_bounded_and_not_handed_out(monkeypatch):
    monkeypatch.setattr("rollout.chat.MAX_OPENINGS", 3)
    chat = Chat(TOKENIZER)
    chat.open(QUESTION).append(7)
    assert chat.open(QUESTION)[-1] != 7
    for i in range(10):
        chat.open([{"role": "user", "content": str(i)}])
        assert len(chat._openings) <= 3
    unknown = [{"role": "user", "content": "hi", "image": object()}]
    assert chat.open(unknown) == chat.open([{"role": "user", "content": "hi"}])


def test_reading_keeps_every_character():
    ids = encode(" a  , b\u00e9 <|im_start|>") + encode("<|im_end|>")
    reply = Chat(TOKENIZER).read(ids, finished=True)
    assert reply.text == " a  , b\u00e9 <|im_start|>"
    assert Chat(TOKENIZER).read(ids, finished=False).text.endswith("<|im_end|>")
