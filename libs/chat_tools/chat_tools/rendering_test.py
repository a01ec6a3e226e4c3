import pytest

from chat_tools.rendering import extend, render
from chat_tools.testing import QWEN_LIKE, tiny_tokenizer

TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "see you"},
]


@pytest.mark.parametrize("marks", [True, False])
def test_mask_covers_what_the_assistant_wrote(marks):
    tokenizer = tiny_tokenizer(QWEN_LIKE, marks=marks)
    rendered = render(tokenizer, TALK)
    assert rendered.problems == ()
    assert rendered.ids == tokenizer.apply_chat_template(TALK, return_dict=True)["input_ids"]
    assert [tokenizer.decode(rendered.ids[s.token_start : s.token_end]) for s in rendered.spans] == [
        "hello<|im_end|>",
        "see you<|im_end|>",
    ]
    assert tokenizer.decode([i for i, m in zip(rendered.ids, rendered.assistant_mask, strict=True) if m]) == (
        "hello<|im_end|>see you<|im_end|>"
    )


def test_extend_keeps_sampled_tokens():
    tokenizer = tiny_tokenizer(QWEN_LIKE)
    prompt = render(tokenizer, TALK[:1], add_generation_prompt=True)
    # letter by letter, as the tokenizer would not cut it
    sampled = [*(tokenizer(c)["input_ids"][0] for c in "hello"), tokenizer.eos_token_id]
    longer = extend(prompt.generated(sampled), TALK[2:3])
    assert longer.ids[: len(prompt.ids) + len(sampled)] == prompt.ids + sampled
    assert longer.text == render(tokenizer, TALK[:3], add_generation_prompt=True).text
    assert sum(longer.assistant_mask) == len(sampled)
