"""Which tokens are trained, by message, and an end that the template leaves out."""

import pytest

from chat_tools.rendering.continuation import extend
from chat_tools.rendering.render import render
from chat_tools.rendering.training import loss_weights, reasoning_mask, with_end
from chat_tools.testing.tokenizer import tiny_tokenizer

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "see you"},
]
CHATML, GLM = tiny_tokenizer("chatml", marks=False), tiny_tokenizer("glm", marks=False)


def test_messages_are_chosen_and_weighted() -> None:
    rendered = render(CHATML, TALK)

    def trained(**how: object) -> dict[float, str]:
        column = loss_weights(rendered, **how)  # type: ignore[arg-type]
        assert len(column) == len(rendered.ids)
        values = sorted(set(column) - {0.0})
        return {v: CHATML.decode([i for i, w in zip(rendered.ids, column, strict=True) if w == v]) for v in values}

    both = "hello<|im_end|>see you<|im_end|>"
    assert trained() == {1.0: both}
    assert [bool(weight) for weight in loss_weights(rendered)] == rendered.assistant_mask
    assert trained(train="last") == trained(train=[3]) == {1.0: "see you<|im_end|>"}
    assert trained(weights={1: 0.5}) == {0.5: "hello<|im_end|>", 1.0: "see you<|im_end|>"}
    assert trained(weights={1: 0}) == {1.0: "see you<|im_end|>"}
    assert trained(train=[]) == {}
    tokens = sum(weight > 0 for weight in loss_weights(rendered, "last"))
    assert [w for w in loss_weights(rendered, "last", {3: range(tokens)}) if w] == list(range(1, tokens))


THINKING = tiny_tokenizer("thinking", marks=False)
THOUGHT = [{"role": "user", "content": "hi"}, {"role": "assistant", "reasoning_content": "hm", "content": "yo</think>"}]


def test_reasoning_is_weighed_apart() -> None:
    rendered = render(THINKING, THOUGHT, stop_tokens=["<|im_end|>"])
    halves = loss_weights(rendered, weights={1: 2.0}, reasoning=0.25)
    words = {w: THINKING.decode([i for i, x in zip(rendered.ids, halves, strict=True) if x == w]) for w in set(halves)}
    assert (words[0.5], words[2.0]) == ("hm\n</think>", "\n\nyo</think><|im_end|>")
    assert not any(w for w, r in zip(loss_weights(rendered, reasoning=0), reasoning_mask(rendered), strict=True) if r)
    assert not any(reasoning_mask(render(CHATML, TALK)))
    inline = [THOUGHT[0], {"role": "assistant", "content": "<think>hm</think>yo"}]
    told = render(CHATML, inline)
    assert CHATML.decode([i for i, r in zip(told.ids, reasoning_mask(told), strict=True) if r]) == "<think>hm</think>"
    with pytest.raises(ValueError, match="written otherwise than gemma"):
        reasoning_mask(rendered, "gemma")
    prompt = render(CHATML, TALK[:1], add_generation_prompt=True)
    with pytest.raises(ValueError, match="weigh its messages by token"):
        loss_weights(prompt.generated(CHATML.convert_tokens_to_ids(list("hello"))), reasoning=0)


def test_a_choice_without_an_effect_is_refused() -> None:
    rendered = render(CHATML, TALK)
    with pytest.raises(ValueError, match="message 0 cannot be trained"):
        loss_weights(rendered, [0])
    with pytest.raises(ValueError, match="message 7 cannot be trained"):
        loss_weights(rendered, weights={7: 1.0})
    with pytest.raises(ValueError, match=r"weight of message 1 is -1\.0: weights are numbers of at least 0"):
        loss_weights(rendered, weights={1: -1.0})
    with pytest.raises(ValueError, match="message 1 has 1 weights for"):
        loss_weights(rendered, weights={1: [1.0]})
    with pytest.raises(ValueError, match="message 1 has a weight and is not among"):
        loss_weights(rendered, "last", {1: 0.5})
    with pytest.raises(ValueError, match='"last" or messages'):
        loss_weights(rendered, "first")  # type: ignore[arg-type]
    left_out = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    silent = tiny_tokenizer("chatml", template="{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}")
    with pytest.raises(ValueError, match="leaves out some of its tool calls"):
        loss_weights(render(silent, [TALK[0], left_out]), "last")


def test_an_end_that_the_template_leaves_out_is_written_once() -> None:
    stops = ["<|user|>", "<|observation|>"]
    rendered = render(GLM, TALK, stop_tokens=stops)
    ended = with_end(rendered, "<|user|>")
    assert (rendered.unfinished, ended.unfinished, ended.stop) == ((3,), (), "<|user|>")
    assert ended.ids == [*rendered.ids, GLM.convert_tokens_to_ids("<|user|>")]
    assert ended.assistant_mask == [*rendered.assistant_mask, True]
    assert with_end(ended, "<|user|>") is ended
    more = [{"role": "user", "content": "more"}]
    assert extend(ended, more).text == render(GLM, [*TALK, *more], add_generation_prompt=True, stop_tokens=stops).text
    whole = render(CHATML, TALK)
    assert with_end(whole, "<|im_end|>") is whole
    asked = render(GLM, TALK[:3], add_generation_prompt=True, stop_tokens=stops)
    assert with_end(asked, "<|user|>") is asked
    with pytest.raises(ValueError, match="not one token"):
        with_end(rendered, "the end")
