"""The 72 chat templates of real models in TRL's wheel: fails, and does not skip, where trl is not installed."""

import sys

import pytest

from chat_tools.conformance.check_templates import CONVERSATIONS, check_template, first_rendering, known_stops
from chat_tools.conformance.real_templates import family_of, real_tokenizer, template_names
from chat_tools.rendering.continuation import extend, text_after_turn
from chat_tools.rendering.render import render

NAMES = template_names()
render_module = sys.modules["chat_tools.rendering.render"]  # its name is the function's too
# What is named as a problem is that a template leaves calls out; nothing else is.
LEAVE_CALLS_OUT = {
    "cohere", "cohere2", "deepseek_r1_distill", "gemma", "gemma3", "gptoss", "idefics3", "lfm2", "llama3", "llava_next",
    "phi3", "phi3_5", "qwen2_5_vl", "smolvlm",
}  # fmt: skip
LEAVE_TEXT_OUT = {"gptoss", "llama3_1", "llama3_2", "muse_glimmer", "phi3", "phi3_5"}  # beside calls, of their results


def test_all_templates_are_there() -> None:
    assert len(NAMES) == 72
    assert sum(name.endswith("_training") for name in NAMES) == 31
    assert len(CONVERSATIONS) == 14


@pytest.mark.parametrize("name", ["hunyuan_a13b", "internlm2_tool", "llama4_pythonic", "phi4_mini", "xlam_llama"])
def test_vllms_examples_have_families(name: str) -> None:
    """They are tried by hand (MEASURED.md): the templates lie in vLLM's source distribution."""
    family = family_of(f"tool_chat_template_{name}")
    assert set(family.closings) <= set(family.stops)
    assert set(family.stops) != {"</s>"}, "Mistral's, whose name is a beginning of none of these"


@pytest.mark.parametrize("name", NAMES)
def test_a_real_template_conforms(name: str) -> None:
    row = check_template(name)
    assert row.failures == []
    assert row.rendered >= 7
    assert row.turns >= 13
    left_out = [problem for problem in row.problems if problem.endswith("leaves out some of its tool calls")]
    lost = [problem for problem in row.problems if problem.endswith("leaves out text of it")]
    assert len(row.problems) == len(left_out) + len(lost)
    assert bool(lost) == (name.removesuffix("_training") in LEAVE_TEXT_OUT)
    assert row.mask_safe
    assert bool(left_out) == (name.removesuffix("_training") in LEAVE_CALLS_OUT)


@pytest.mark.parametrize("name", NAMES)
def test_a_rendering_with_marks_gives_what_one_without_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`render` takes the text from the marked rendering where its ids prove it; here it must do without."""
    tokenizer = real_tokenizer(name)
    stops = known_stops(tokenizer, family_of(name))
    found = [first_rendering(tokenizer, pattern, family_of(name)) for pattern in CONVERSATIONS.values()]
    asked = []
    monkeypatch.setattr(render_module, "shape_of", lambda *_: None)  # nor from what earlier rows have told
    monkeypatch.setattr(render_module, "render_marked", lambda *arguments: asked.append(arguments))
    for messages, rendered in filter(None, found):
        assert render(tokenizer, messages, stop_tokens=stops) == rendered
    assert asked


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("gemma4", "glm", "gptoss", "phi3"))])
def test_what_models_sample_last_is_continued_exactly(name: str) -> None:
    assert check_template(name).extended >= 27


@pytest.mark.parametrize("name", [name for name in NAMES if not name.endswith("_training")])
def test_what_follows_a_turn_does_not_depend_on_what_came_before(name: str) -> None:
    """As text for any conversation, by the short one: for each stop token, and for none."""
    tokenizer = real_tokenizer(name)
    stops = [stop for stop in family_of(name).stops if stop in tokenizer.get_vocab()]
    parts = name.startswith(("idefics3", "llava_next", "smolvlm"))
    said = ["what is the weather", "hello there", "and today?"]
    first, answer, question = ([{"type": "text", "text": text}] if parts else text for text in said)
    asked = render(tokenizer, [{"role": "user", "content": first}], add_generation_prompt=True, stop_tokens=stops)
    new = [{"role": "user", "content": question}]
    for stop in ("", *stops):
        sampled = tokenizer(said[1] + stop, add_special_tokens=False)["input_ids"]
        turn = asked.generated(sampled, {"role": "assistant", "content": answer})
        text = text_after_turn(tokenizer, new, stop, stop_tokens=stops)
        assert extend(turn, new).text == turn.text + text
        assert said[2] in text


def test_a_marker_need_not_be_declared_special() -> None:
    tokenizer = real_tokenizer("gptoss")
    assert "<|end|>" not in tokenizer.all_special_tokens
    assert "<|end|>" in tokenizer.get_added_vocab()


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ValueError, match="add it to FAMILIES"):
        family_of("unheard_of")
