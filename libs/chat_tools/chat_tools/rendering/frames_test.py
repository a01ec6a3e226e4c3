import json
from types import SimpleNamespace

import pytest

from chat_tools.rendering.frames import find_frame
from chat_tools.rendering.stop_tokens import read_stop_tokens
from chat_tools.rendering.template import ChatTemplate, tokens_as_text
from chat_tools.testing.tokenizer import tiny_tokenizer

SAY = {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("name", "prompt", "closings"),
    [
        ("chatml", "<|im_start|>assistant\n", ("<|im_end|>",)),
        ("thinking", "<|im_start|>assistant\n<think>\n", ("<|im_end|>",)),
        ("mistral", "", ("</s>",)),
        ("glm", "<|assistant|>\n", ()),
        ("harmony", "<|start|>assistant", ("<|return|>", "<|end|>")),
    ],
)
def test_the_frame_of_a_family(name, prompt, closings):
    frame = find_frame(ChatTemplate(tiny_tokenizer(name, marks=False), None, {}), SAY)
    assert frame.prompt == prompt
    assert frame.closings == closings
    assert set(closings) <= set(frame.stops)


def test_a_prompt_begins_with_a_whole_token():
    """Without a prompt Phi-3 writes another token there, whose first characters are the same."""
    template = (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt else '<|endoftext|>' }}"
    )
    frame = find_frame(ChatTemplate(tiny_tokenizer("chatml", template=template), None, {}), SAY)
    assert frame.prompt == "<|assistant|>\n"


def test_a_frame_is_remembered_for_its_template_alone():
    tokenizer = tiny_tokenizer("chatml", marks=False)
    first = find_frame(ChatTemplate(tokenizer, None, {}), SAY)
    assert find_frame(ChatTemplate(tokenizer, None, {}), SAY) is first
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n", "helper\n")
    assert find_frame(ChatTemplate(tokenizer, None, {}), SAY).prompt == "<|im_start|>helper\n"
    assert find_frame(ChatTemplate(tokenizer, None, {}, ("<|endoftext|>",)), SAY).stops[0] == "<|endoftext|>"


def test_stop_tokens_are_read_from_a_generation_config(tmp_path):
    tokenizer = tiny_tokenizer("harmony")
    ids = tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    expected = ("<|return|>", "<|call|>")
    assert read_stop_tokens(tmp_path, tokenizer) == expected
    assert read_stop_tokens(str(tmp_path), tokenizer) == expected
    assert read_stop_tokens({"eos_token_id": ids}, tokenizer) == expected
    assert read_stop_tokens(SimpleNamespace(eos_token_id=ids[0]), tokenizer) == expected[:1]
    assert read_stop_tokens(tmp_path / "none", tokenizer) == ()
    assert read_stop_tokens({}, tokenizer) == ()


def test_stop_tokens_of_another_model_are_refused():
    tokenizer = tiny_tokenizer("chatml")
    assert tokens_as_text(["<|im_end|>", "<|im_end|>"], tokenizer) == ("<|im_end|>",)
    with pytest.raises(ValueError, match="another model's"):
        tokens_as_text([10**6], tokenizer)
    with pytest.raises(ValueError, match="not one token"):
        tokens_as_text(["<|eot_id|>"], tokenizer)
