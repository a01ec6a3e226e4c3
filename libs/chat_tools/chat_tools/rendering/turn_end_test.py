"""The whole end of a turn is trained, and written once where a conversation goes on."""

from typing import Any

import pytest

from chat_tools.rendering.continuation import extend
from chat_tools.rendering.render import Rendered, render
from chat_tools.testing.tokenizer import tiny_tokenizer

# As Kimi K3: the end is many tokens, some of which stand elsewhere too.
MANY_TOKENS = (
    '{% for m in messages %}<|open|>message role="{{ m.role }}"<|sep|>{% if m.role == "assistant" %}'
    "<|open|>response<|sep|>{{ m.content }}<|close|>response<|sep|>{% else %}{{ m.content }}{% endif %}"
    "<|close|>message<|sep|><|eom|>{% endfor %}{% if add_generation_prompt %}"
    '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>{% endif %}'
)
# As Command A: the prompt stands behind every conversation, and the answer's own markers are sampled.
ALWAYS_PROMPTED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|A|><|ANSWER|>{{ m.content }}<|/ANSWER|><|eom|>"
    "{% else %}<|U|>{{ m.content }}<|eom|>{% endif %}{% endfor %}<|A|>"
)
# As Solar: a turn of calls ends in a token of its own, and the results' header holds another format's end.
FOREIGN_END = (
    "{% for m in messages %}<|open|>{{ m.role }}{% if m.role == 'tool' %}<|tool_response|>{{ m.content }}<|eom|>"
    "{% elif m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name }}<|sep|>"
    "{{ c.function.arguments | tojson }}{% endfor %}<|calls|>{% else %}<|sep|>{{ m.content }}<|eom|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|open|>assistant{% endif %}"
)
TALK: list[dict[str, Any]] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
MORE = {"role": "user", "content": "more"}
END, STOPS = "<|close|>response<|sep|><|close|>message<|sep|><|eom|>", ["<|eom|>"]


def tokenizer_of(source: str) -> Any:
    tokenizer = tiny_tokenizer("chatml", template=source)
    markers = ("open", "close", "sep", "A", "U", "ANSWER", "/ANSWER", "calls", "tool_response", "eom")
    tokenizer.add_tokens([f"<|{marker}|>" for marker in markers])
    tokenizer.eos_token = "<|eom|>"
    return tokenizer


def trained(rendered: Rendered, tokenizer: Any) -> str:
    return str(tokenizer.decode([i for i, on in zip(rendered.ids, rendered.assistant_mask, strict=True) if on]))


@pytest.mark.parametrize("stops", [STOPS, None])
@pytest.mark.parametrize(
    ("source", "turn"), [(MANY_TOKENS, f"yes{END}"), (ALWAYS_PROMPTED, "<|ANSWER|>yes<|/ANSWER|><|eom|>")]
)
def test_a_turn_with_an_end_of_many_tokens(source: str, turn: str, stops: list[str] | None) -> None:
    tokenizer = tokenizer_of(source)
    for talk in (TALK, [*TALK, MORE, TALK[1]]):
        rendered = render(tokenizer, talk, stop_tokens=stops)
        assert (trained(rendered, tokenizer), rendered.problems) == (turn * (len(talk) // 2), ())
        assert rendered.stop == "<|eom|>"
    prompt = render(tokenizer, TALK[:1], add_generation_prompt=True, stop_tokens=stops)
    sampled = prompt.generated(tokenizer.encode(turn, add_special_tokens=False))
    longer = extend(sampled, [MORE])
    assert longer.text == render(tokenizer, [*TALK, MORE], add_generation_prompt=True, stop_tokens=stops).text
    if source == MANY_TOKENS:  # the other one has written its prompt behind the answer already
        assert extend(render(tokenizer, TALK, stop_tokens=stops), [MORE]).text == longer.text


@pytest.mark.parametrize("said", ["yes", "yes<|close|>", "yes<|close|>response<|sep|><|close|>message<|sep|>"])
def test_a_turn_that_was_cut_off_within_its_end_gets_the_rest(said: str) -> None:
    tokenizer = tokenizer_of(MANY_TOKENS)
    prompt = render(tokenizer, TALK[:1], add_generation_prompt=True, stop_tokens=STOPS)
    turn = prompt.generated(tokenizer.encode(said, add_special_tokens=False), TALK[1])
    whole = render(tokenizer, [*TALK, MORE], add_generation_prompt=True, stop_tokens=STOPS)
    assert extend(turn, [MORE]).text == whole.text


def test_what_ends_turns_in_other_formats_ends_none_here() -> None:
    tokenizer = tokenizer_of(FOREIGN_END)
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    talk = [
        TALK[0],
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "out"},
        TALK[1],
    ]
    rendered = render(tokenizer, talk)
    assert trained(rendered, tokenizer) == 'f<|sep|>{"a": 1}<|calls|><|sep|>yes<|eom|>'
