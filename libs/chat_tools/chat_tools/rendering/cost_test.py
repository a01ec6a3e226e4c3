"""What rendering costs: calls of the template and of the tokenizer, by the number of turns."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from chat_tools.rendering.render import render
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


def costs(monkeypatch: pytest.MonkeyPatch, tokenizer: Any, messages: list[dict[str, Any]]) -> dict[str, int]:
    """The renderings and the tokenised texts of one `render`, what is kept of the template known."""
    render(tokenizer, messages)
    counts = {"apply_chat_template": 0, "__call__": 0}
    with monkeypatch.context() as patch:
        for name in counts:
            original = getattr(PreTrainedTokenizerBase, name)

            def counted(self: Any, *args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
                counts[name] += 1
                return original(self, *args, **kwargs)

            counted.__module__ = original.__module__
            patch.setattr(PreTrainedTokenizerBase, name, counted)
        render(tokenizer, messages)
    return counts


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
    short, long = (costs(monkeypatch, tokenizer, talk(turns)) for turns in (8, 24))
    assert long == short
    assert long["apply_chat_template"] <= 6
    assert long["__call__"] <= 1
