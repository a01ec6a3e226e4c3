"""Which tokens are trained, by message, and an end that the template leaves out."""

import pytest

from chat_tools.rendering.continuation import extend
from chat_tools.rendering.render import render
from chat_tools.rendering.training import loss_weights, with_end
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


def test_a_choice_without_an_effect_is_refused() -> None:
    rendered = render(CHATML, TALK)
    with pytest.raises(ValueError, match="message 0 cannot be trained"):
        loss_weights(rendered, [0])
    with pytest.raises(ValueError, match="message 7 cannot be trained"):
        loss_weights(rendered, weights={7: 1.0})
    with pytest.raises(ValueError, match="weights are 0 or more"):
        loss_weights(rendered, weights={1: -1.0})
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
