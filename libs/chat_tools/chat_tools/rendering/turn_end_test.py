"""The whole end of a turn is trained, and written once where a conversation goes on."""

from collections.abc import Sequence
from typing import Any

import pytest

from chat_tools.rendering import turn_end
from chat_tools.rendering.continuation import extend
from chat_tools.rendering.masks import find_regions
from chat_tools.rendering.render import Rendered, render
from chat_tools.rendering.template import ChatTemplate, Message
from chat_tools.rendering.turn_delimiters import TurnDelimiters
from chat_tools.rendering.turn_end import Turn, end_of_turn
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


USER, SAY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
TURN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}BODY{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def template(source: str, tokens: Sequence[str] = ()) -> ChatTemplate:
    tokenizer = tiny_tokenizer("chatml", template=source)
    tokenizer.add_tokens(list(tokens))
    return ChatTemplate(tokenizer, None, {}, ("<|im_end|>",))


REFUSING = template("{{ raise_exception('no') }}")


def end(
    text: str,
    piece_end: int,
    upper: int,
    delimiters: TurnDelimiters | None = None,
    last: bool = True,
    made: ChatTemplate = REFUSING,
    messages: Sequence[Message] = (USER, SAY, USER),
    index: int = 1,
) -> int | None:
    placed = Turn(messages, index, text, True, piece_end, upper, last)
    return end_of_turn(made, delimiters or TurnDelimiters("", ""), placed)


def test_a_region_ends_with_the_first_stop_token_of_its_own() -> None:
    delimiters = TurnDelimiters("", "", stops=("<e>", "<end>"))
    assert end("<e>hi <end>x<e>", 5, 15, delimiters) == 11
    assert end("hi<e>x", 2, 6, delimiters) == 5
    assert end("hi q<e>", 2, 4, delimiters, last=False) is None  # it is behind what somebody else wrote
    assert end("hi q<e>", 2, 4, delimiters) is None
    assert end("hi q<e>", 2, 7, delimiters) is None  # nor is it told whose what stands before it is


def test_without_a_stop_token_a_region_ends_where_the_rendering_up_to_it_does() -> None:
    source = "{% for m in messages %}{{ m.content + ' .\n' }}{% endfor %}"
    made = template(source)
    text = made.text([USER, SAY, USER])
    assert text == "hi .\nhello .\nhi .\n"
    assert end(text, 10, len(text), made=made) == 12
    assert end(text, 10, 11, made=made) == 10  # not beyond the next one's words
    counting = template("{{ messages | length }}" + source)
    assert end(counting.text([USER, SAY, USER]), 11, 14, made=counting) == 13


def test_a_token_that_only_begins_alike_is_not_the_turns() -> None:
    source = "{{ messages[1].content }}{{ '[go off]' if messages | length > 2 else '[go on]' }}"
    made = template(source, tokens=["[go on]", "[go off]"])
    assert end("hello[go off]", 5, 13, made=made) is None


def test_a_turn_of_a_known_shape_ends_without_a_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever numbers its call has."""
    body = "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    made = template(TURN.replace("BODY", body))
    rendered: list[object] = []
    alone = turn_end._behind_alone

    def counted(*given: Any) -> str | None:
        rendered.append(given)
        return alone(*given)

    monkeypatch.setattr(turn_end, "_behind_alone", counted)
    messages: list[Message] = []
    for number in range(9):
        calls = [{"function": {"name": "f", "arguments": {"x": number}}}]
        messages += [USER, {**SAY, "content": "", "tool_calls": calls}, {"role": "tool", "content": "42"}, SAY]
    text = made.text(messages)
    regions = find_regions(made, messages, text, False).regions
    assert [text[r.body_end : r.end] for r in regions] == ["<|im_end|>"] * 18
    assert all(text[r.start : r.end].count("<|im_end|>") == 1 for r in regions)
    assert len(rendered) == 2  # a call, and an answer before a question


def test_a_turn_that_is_written_in_another_way_once_it_is_answered_is_not_cut_short() -> None:
    """Apriel writes the numbers of calls, and the end, only where a message follows."""
    number = "{{ ', 1]<|im_end|>' if not loop.last else ']' }}"
    made = template(TURN.replace("BODY{{ '<|im_end|>\n' }}", "{{ m.content }}" + number))
    regions = find_regions(made, [USER, SAY, USER], made.text([USER, SAY, USER]), False)
    assert (regions.regions, regions.problems) == ([], ["message 1: where its turn ends cannot be told"])
