"""What a plan gives is what rendering with marks gives, and rows of one shape are rendered once each."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chat_tools.rendering import plans
from chat_tools.rendering import render as rendering
from chat_tools.rendering.render import Rendered, Renderer, render
from chat_tools.rendering.template import ChatTemplate, rendering_errors
from chat_tools.testing.templates import TEMPLATES
from chat_tools.testing.tokenizer import tiny_tokenizer

TOKENIZERS = {(name, marks): tiny_tokenizer(name, marks) for name in TEMPLATES for marks in (True, False)}
WORD = st.sampled_from(
    ["a", "b c", "\n", " ", "<think>", "</think>", "<|im_end|>", '"', "\u00e9", "\U0001f600", "{}", "x"]
)
TEXTS = st.lists(WORD, max_size=4).map("".join)


def call(argument: Any) -> dict[str, Any]:
    return {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": argument}}}


def talks(texts: list[str]) -> list[list[dict[str, Any]]]:
    """Conversations of several shapes with the same texts."""
    one, two, three, four = texts
    asked, answer = {"role": "user", "content": one}, {"role": "assistant", "content": two}
    calls = {"role": "assistant", "content": "", "tool_calls": [call(three)]}
    result = {"role": "tool", "content": four, "tool_call_id": "call00001", "name": "add"}
    return [
        [asked, answer],
        [{"role": "system", "content": four}, asked, answer, {**asked, "content": three}],
        [asked, calls, result, answer],
        [asked, {**answer, "reasoning_content": three}],
    ]


def by_marks(tokenizer: Any, talk: list[dict[str, Any]]) -> Rendered:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "shape_of", lambda *_: None)
        return render(tokenizer, talk)


@pytest.mark.parametrize(("name", "marks"), TOKENIZERS)
@settings(max_examples=6)
@given(st.lists(TEXTS, min_size=4, max_size=4))
@example(["one", "two", "three", "four"])
@example(["one", "one", "one", "one"])
@example(["one\n\n two", "three\nfour", "five \n six", "\u00e9\n\U0001f600"])
def test_as_by_marks(name: str, marks: bool, texts: list[str]) -> None:
    tokenizer = TOKENIZERS[name, marks]
    for plain, talk in zip(talks(["w", "x", "y", "z"]), talks(texts), strict=True):
        try:
            expected = by_marks(tokenizer, talk)
            for _ in range(2):
                render(tokenizer, plain)
        except rendering_errors():
            continue
        assert replace(render(tokenizer, talk), template=None) == replace(expected, template=None)


@pytest.mark.parametrize(("kind", "marks"), [(0, False), (2, False), (2, True)])  # a turn of calls has an empty text
def test_a_shape_is_learned_once(monkeypatch: pytest.MonkeyPatch, kind: int, marks: bool) -> None:
    tokenizer = tiny_tokenizer("chatml", marks=marks)
    counted: list[str] = []
    trial = ChatTemplate.trial

    def counting(*given: Any) -> str:
        counted.append(trial(*given))
        return counted[-1]

    monkeypatch.setattr(ChatTemplate, "trial", counting)
    rows = [talks([f"{n}", f"{n} and", f"y{n}", "z"])[kind] for n in range(6)]
    trials = []
    for row in rows:
        counted.clear()
        render(tokenizer, row)
        trials.append(len(counted))
    assert trials[2:] == [0, 0, 0, 0]
    (plan,) = [plan for plan in plans._plans(ChatTemplate(tokenizer, None, {}), False).values() if plan]
    assert isinstance(plan, plans.Plan)
    counted.clear()
    render(tokenizer, talks(["0 ", "\nx", "y", "z"])[kind])  # white space around: by marks
    assert counted


def test_long_conversations_have_no_plan() -> None:
    tokenizer = tiny_tokenizer("chatml", marks=False)
    talk = talks(["a", "b", "c", "d"])[0] * 9
    for _ in range(3):
        render(tokenizer, talk)
    assert not plans._plans(ChatTemplate(tokenizer, None, {}), False)


@pytest.mark.parametrize("name", ["chatml", "thinking"])
def test_a_renderer_renders_as_render_does(name: str) -> None:
    tokenizer = tiny_tokenizer(name, marks=True)
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}" + str(
        tokenizer.chat_template
    )
    renderer = Renderer(tokenizer, ["<|im_end|>"])

    def add(a: int) -> int:
        """Add.

        Args:
            a: a number
        """
        return a

    tools = [[{"type": "function", "function": {"name": word, "parameters": {}}}] for word in ("one", "two")]
    for kind in [None, *tools, [add], [], tools[0]]:
        for talk in talks(["w", "x", "y", "z"]):
            for prompted in (False, True):
                expected = render(tokenizer, talk, kind, prompted, stop_tokens=["<|im_end|>"])
                assert replace(renderer(talk, kind, prompted), template=None) == replace(expected, template=None)
