"""What follows a turn of a long conversation: by a short history the same tokens as by the whole, for less.

The oracle is the rendering of the whole conversation, by a chat without short histories.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from chat_tools.conformance.real_templates import family_of, real_tokenizer, template_names
from rollout.chat.chat import Chat
from rollout.testing.chat import TEMPLATE, tiny_tokenizer
from rollout.tools.tool import Tool

Messages = list[dict[str, Any]]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = Tool("get_weather", "Tells it.", CITY, lambda city: "sunny")
KINDS = ("says", "thinks", "calls", "calls twice", "thinks and calls")


def unit(kind: str, number: int, parts: bool = False) -> Messages:
    """An assistant's turn of a kind, and what is said to it."""

    def text(words: str) -> Any:
        return [{"type": "text", "text": words}] if parts else words

    answer: dict[str, Any] = {"role": "assistant", "content": text("" if "calls" in kind else f"it is {number}")}
    if "thinks" in kind:
        answer["reasoning_content"] = f"hmm {number}"
    if "calls" not in kind:
        return [answer, {"role": "user", "content": text(f"and {number}?")}]
    ids = [f"call{number:04}{at}" for at in range(2 if "twice" in kind else 1)]
    function = {"name": "get_weather", "arguments": {"city": f"Paris {number}"}}
    answer["tool_calls"] = [{"type": "function", "id": id_, "function": function} for id_ in ids]
    results = [{"role": "tool", "name": "get_weather", "tool_call_id": id_, "content": f"{number}"} for id_ in ids]
    return [answer, *results]


def opened(parts: bool = False) -> Messages:
    return [{"role": "user", "content": [{"type": "text", "text": "what?"}] if parts else "what?"}]


def play(chat: Chat, kinds: list[str], parts: bool, outcome: Callable[[int, Any], None], first: int = 0) -> None:
    """Pass to `outcome` what follows each turn of a conversation; a ValueError where the template refuses."""
    messages, outline = opened(parts), chat.outline()
    for number, kind in enumerate(kinds, first):
        turn, *new = unit(kind, number, parts)
        messages.append(turn)
        stop = chat.stop_ids[0] if number % 7 else None
        try:
            outcome(number, chat.follow(messages, new, [WEATHER], stop, outline))
        except ValueError as error:
            outcome(number, str(error))
        messages += new


def whole_chat(*given: Any, **options: Any) -> Chat:
    chat = Chat(*given, **options)
    chat._short._texts = None
    return chat


@pytest.mark.parametrize("name", template_names())
def test_tokens_are_those_of_whole_conversations(name: str) -> None:
    tokenizer, stops = real_tokenizer(name), family_of(name).stops
    chat, plain = Chat(tokenizer, stop_tokens=stops), whole_chat(tokenizer, stop_tokens=stops)
    parts = name.startswith("llava_next")
    rng = random.Random(name)
    drawn = [[rng.choice(allowed) for _ in range(14)] for allowed in (KINDS[:1], KINDS[:2], KINDS)]
    calls = ["calls"] * 11
    for kinds in (*drawn, [*calls, "says"], [*calls[:4], "thinks and calls", *calls[5:], "says"]):
        expected: dict[int, Any] = {}
        play(plain, kinds, parts, expected.__setitem__)
        for _ in range(2):  # once compared, once relied upon
            found: dict[int, Any] = {}
            play(chat, kinds, parts, found.__setitem__)
            assert found == expected


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ PLACE }}{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LOOKS_FURTHER = {
    "a number of each message": CHATML.replace("PLACE", "loop.index"),
    "a number of rounds": "{% set ns = namespace(n=0) %}"
    + CHATML.replace("{{ PLACE }}", "{% if m.role == 'user' %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endif %}"),
    "each third differs": CHATML.replace("PLACE", "'!' if loop.index % 3 == 0 else ''"),
    "from the fiftieth on": CHATML.replace("PLACE", "'!' if loop.index > 25 else ''"),
    "but the last ten": CHATML.replace("PLACE", "'!' if loop.revindex > 10 else ''"),
    "all that was said": "{% set ns = namespace(s='') %}"
    + CHATML.replace("{{ PLACE }}", "{% set ns.s = ns.s + m.content %}{{ ns.s }}"),
    "a word heard long ago": "{% set ns = namespace(s='') %}"
    + CHATML.replace("{{ PLACE }}", "{% if 'is 4' in m.content %}{% set ns.s = '!' %}{% endif %}{{ ns.s }}"),
    "each second differs": CHATML.replace("PLACE", "'!' if loop.index % 2 else ''"),
}


@pytest.mark.parametrize("name", LOOKS_FURTHER)
def test_nor_do_templates_differ_that_look_further_back(name: str) -> None:
    tokenizer = tiny_tokenizer(LOOKS_FURTHER[name] + PROMPT)
    chat, plain = Chat(tokenizer, "<|im_end|>"), whole_chat(tokenizer, "<|im_end|>")
    for first, kind in ((100, "says"), (0, "says"), (0, "calls twice")):
        expected: dict[int, Any] = {}
        found: dict[int, Any] = {}
        play(plain, [kind] * 30, False, expected.__setitem__, first)
        play(chat, [kind] * 30, False, found.__setitem__, first)
        assert found == expected
    assert (chat.outline() is not None) == (name in ("each second differs", "a word heard long ago"))


def characters(monkeypatch: pytest.MonkeyPatch, chat: Chat, kinds: list[str]) -> dict[int, int]:
    """Count what is rendered for each turn of a conversation, after one as long was played."""
    play(chat, kinds, False, lambda number, found: None)
    chat._texts.clear()
    counts: dict[int, int] = {}
    written = [0]
    render = chat.render

    def counted(*given: Any, **options: Any) -> str:
        text = render(*given, **options)
        written[0] += len(text)
        return text

    def outcome(number: int, found: Any) -> None:
        counts[number] = written[0]
        written[0] = 0

    with monkeypatch.context() as patch:
        patch.setattr(chat, "render", counted)
        play(chat, kinds, False, outcome)
    return counts


@pytest.mark.parametrize("name", ["qwen3_training", "qwen3_5_think", "llama3_1", "gptoss", "glm4moe", "tiny"])
@pytest.mark.parametrize("kinds", [("says",), ("thinks and calls", "calls", "says")])
def test_a_turn_costs_the_same_at_turn_400(monkeypatch: pytest.MonkeyPatch, name: str, kinds: tuple[str, ...]) -> None:
    tokenizer = tiny_tokenizer(TEMPLATE) if name == "tiny" else real_tokenizer(name)
    chat = Chat(tokenizer) if name == "tiny" else Chat(tokenizer, stop_tokens=family_of(name).stops)
    counts = characters(monkeypatch, chat, [kinds[at % len(kinds)] for at in range(403)])
    assert max(counts[at] for at in range(396, 403)) <= 2.5 * max(counts[at] for at in range(4, 10))
