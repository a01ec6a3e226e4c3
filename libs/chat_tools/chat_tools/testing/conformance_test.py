"""The 72 chat templates of real models in TRL's wheel: fails, and does not skip, where trl is not installed."""

import pytest

from chat_tools.testing.conformance import CONVERSATIONS, check_template
from chat_tools.testing.real_templates import family_of, real_tokenizer, template_names

NAMES = template_names()
# What is named as a problem is that a template leaves calls out; nothing else is.
LEAVE_CALLS_OUT = {
    "cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "gptoss", "idefics3", "lfm2", "llama3", "llava_next",
    "phi3", "phi3_5", "qwen2_5_vl", "smolvlm",
}  # fmt: skip


def test_all_templates_are_there():
    assert len(NAMES) == 72
    assert sum(name.endswith("_training") for name in NAMES) == 31
    assert len(CONVERSATIONS) == 14


@pytest.mark.parametrize("name", NAMES)
def test_a_real_template_conforms(name):
    row = check_template(name)
    assert row.failures == []
    assert row.rendered >= 7
    assert row.turns >= 13
    left_out = [problem for problem in row.problems if problem.endswith("leaves out some of its tool calls")]
    assert row.problems == left_out
    assert row.mask_safe
    assert bool(left_out) == (name.removesuffix("_training") in LEAVE_CALLS_OUT)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("gemma4", "glm", "gptoss", "phi3"))])
def test_what_models_sample_last_is_continued_exactly(name):
    assert check_template(name).extended >= 27


def test_a_marker_need_not_be_declared_special():
    tokenizer = real_tokenizer("gptoss")
    assert "<|end|>" not in tokenizer.all_special_tokens
    assert "<|end|>" in tokenizer.get_added_vocab()


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="add it to FAMILIES"):
        family_of("unheard_of")
