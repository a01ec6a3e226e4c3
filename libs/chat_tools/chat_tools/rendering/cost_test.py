"""What rendering costs: renderings, characters and tokenised texts, by the number of turns."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import pytest
from transformers import PreTrainedTokenizerBase

from chat_tools.rendering import render as rendering
from chat_tools.rendering import template, token_places
from chat_tools.rendering.cached_template import rendered_plain
from chat_tools.rendering.render import render
from chat_tools.rendering.replaced_messages import without_names
from chat_tools.testing.templates import TEMPLATES
from chat_tools.testing.tokenizer import tiny_tokenizer

Talk = Callable[[int], list[dict[str, Any]]]
USER = {"role": "user", "content": "what is the sum?"}


def call(number: int) -> dict[str, Any]:
    function = {"name": "add", "arguments": {"a": f"{number}"}}
    return {"type": "function", "id": f"call{number:05d}", "function": function}


def rounds(turns: int) -> list[dict[str, Any]]:
    """A question, a call, its result and an answer, again and again."""
    messages: list[dict[str, Any]] = []
    for number in range(turns // 2):
        asked = {"role": "assistant", "content": "", "tool_calls": [call(number)]}
        result = {"role": "tool", "content": f"result {number}", "tool_call_id": f"call{number:05d}"}
        messages += [USER, asked, result, {"role": "assistant", "content": f"answer {number}"}]
    return messages


def trajectory(turns: int) -> list[dict[str, Any]]:
    """One question, and calls with results until the answer."""
    messages: list[dict[str, Any]] = [USER]
    for number in range(turns - 1):
        asked = {"role": "assistant", "content": "", "tool_calls": [call(number)]}
        messages += [asked, {"role": "tool", "content": f"{number}", "tool_call_id": f"call{number:05d}"}]
    return [*messages, {"role": "assistant", "content": "done"}]


def silent(turns: int) -> list[dict[str, Any]]:
    """Answers, every other of which is empty."""
    answers = [{"role": "assistant", "content": f"{number}" if number % 2 else ""} for number in range(turns)]
    return [message for answer in answers for message in (USER, answer)]


def in_parts(talk: Talk) -> Talk:
    """The same with contents as lists of parts."""

    def changed(turns: int) -> list[dict[str, Any]]:
        return [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in talk(turns)]

    return changed


class Cost(NamedTuple):
    """The renderings of one `render`, the characters that they wrote, and the texts that were tokenised."""

    renderings: int
    characters: int
    tokenised: int


def cost(
    monkeypatch: pytest.MonkeyPatch,
    tokenizer: Any,
    messages: list[dict[str, Any]],
    before: list[dict[str, Any]] | None = None,
) -> Cost:
    """What one `render` costs, what is kept of the template known, from these messages or from others `before`."""
    render(tokenizer, messages if before is None else before)
    written: list[str] = []
    tokenised: list[str] = []
    apply, quickly, encode = PreTrainedTokenizerBase.apply_chat_template, rendered_plain, token_places.encode

    @wraps(apply)
    def applied(*args: Any, **kwargs: Any) -> Any:
        written.append(apply(*args, **{**kwargs, "tokenize": False}))
        return apply(*args, **kwargs)

    def rendered(*args: Any) -> Any:
        written.append(quickly(*args)[0])
        return quickly(*args)

    def encoded(tokenizer: Any, text: str) -> Any:
        tokenised.append(text)
        return encode(tokenizer, text)

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "apply_chat_template", applied)
        patch.setattr(template, "rendered_plain", rendered)
        patch.setattr(rendering, "encode", encoded)
        result = render(tokenizer, messages)
    assert written
    assert tokenised == [result.text]
    return Cost(len(written), sum(map(len, written)), len(tokenised))


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("talk", [rounds, trajectory, silent, in_parts(rounds), in_parts(trajectory)])
def test_the_number_of_renderings_does_not_grow_with_turns(
    monkeypatch: pytest.MonkeyPatch, name: str, talk: Talk
) -> None:
    tokenizer = tiny_tokenizer(name, marks=False)
    try:
        tokenizer.apply_chat_template(talk(8))
    except TypeError:
        pytest.skip("the template takes no parts")
    short, long = (cost(monkeypatch, tokenizer, talk(turns)) for turns in (8, 24))
    assert long.renderings == short.renderings <= 6
    assert long.characters <= 4 * short.characters  # the texts are 3 times as long, and marks have more room


TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\nBODY{% endfor %}"
CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} ARGUMENTS</call>{% endfor %}"
# What made a rendering for each turn: texts left out, ids between the words, calls that marks cannot be read in, ends
# of turns that cannot be told.
HARD = {
    "leaves texts out": TURN.replace("BODY", "<|im_end|>\n"),
    "prints calls": TURN.replace("BODY", "{{ m.content }}" + CALLS.replace("ARGUMENTS", "{{ c.function.arguments }}"))
    + "<|im_end|>\n",
    "calls in ASCII": TURN.replace(
        "BODY",
        "{{ m.content }}"
        + CALLS.replace("ARGUMENTS", "{{ c.function.arguments | tojson(ensure_ascii=True) }}")
        + "<|im_end|>\n",
    ),
    "parts as Python prints them": TURN.replace("BODY", "{{ m.content }}<|im_end|>\n"),
    "numbers of calls beside parts that are printed": "{% set ns = namespace(calls=0) %}"
    + TURN.replace(
        "BODY",
        "{% for c in m.tool_calls or [] %}<call>{{ ns.calls }} {{ c.function.name }}{% set ns.calls = ns.calls + 1 %}"
        "{% else %}{{ m.content }}{% endfor %}<|im_end|>\n",
    ),
    "ids behind results": "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '' }}{{ m.content }}"
    + CALLS.replace("ARGUMENTS", "{{ c.function.arguments.a }}")
    + "{{ ' of ' + m.tool_call_id + ': ' if m.tool_call_id else '' }}"
    + "{{ '<|im_end|>' if m.role == 'assistant' else '' }}{% endfor %}",
    "ends that cannot be told": "{% for m in messages %}<|im_start|>{{ m.content }}"
    + CALLS.replace("ARGUMENTS", "{{ c.function.arguments.a }}")
    + "{{ '' if loop.last else ' not ' + m.role + ' last ' }}{{ ' end' if loop.last else '' }}{% endfor %}",
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("talk", [rounds, trajectory, in_parts(rounds)])
def test_nor_where_turns_cannot_be_told(monkeypatch: pytest.MonkeyPatch, name: str, talk: Talk) -> None:
    tokenizer = tiny_tokenizer("chatml", template=HARD[name])
    short, long = (cost(monkeypatch, tokenizer, talk(turns)) for turns in (12, 36))
    assert long.renderings == short.renderings <= 16
    assert long.characters <= 4 * short.characters


COUNTED = (
    "{% set ns = namespace(round=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "[Round {{ ns.round }}]\nQ: {{ m.content }}{% set ns.round = ns.round + 1 %}"
    "{% else %}\n{{ ns.round }} {{ m.role }}: {{ m.content }}\n{% endif %}{% endfor %}"
)


def test_rounds_that_a_template_counts_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ChatGLM's: the number behind a turn is the round's, and no other turn has it."""
    tokenizer = tiny_tokenizer("chatml", template=COUNTED)
    found = cost(monkeypatch, tokenizer, rounds(60), rounds(12))
    assert found.renderings <= 6


def test_names_and_ids_do_not_make_turns_different() -> None:
    names: list[dict[str, Any]] = [
        {"tool_call_id": "call1"},
        {"tool_calls": [{"id": "call12"}, "no call"], "content": [1]},
    ]
    text = without_names("a call12 b call1 [1] c", names)
    assert text.text.count("\0") == 3
    assert list(text.names) == ["call12", "call1", "[1]"]
    places = [text.place(length) for length in range(23)]
    assert [text.length(place) for place in places if place is not None] == [
        length for length, place in enumerate(places) if place is not None
    ]
    assert places[2] == 2
    assert places[3:8] == [None] * 5
    assert places[8] == 3
    counted = without_names("1 call12 34", names, numbers=True)
    assert (counted.text.count("\0"), list(counted.names)) == (3, ["1", "call12", "34"])
