"""Sampled tokens and what follows them: token in, token out, the token that stopped the model written once."""

import pytest

from chat_tools.rendering.continuation import extend
from chat_tools.rendering.render import render
from chat_tools.testing.templates import TEMPLATES
from chat_tools.testing.tokenizer import tiny_tokenizer

PLAIN = {name: tiny_tokenizer(name, marks=False) for name in TEMPLATES}
TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "see you"},
]
TOOL = {"role": "tool", "content": "42"}


def call(value: str) -> dict:
    return {"type": "function", "function": {"name": "look", "arguments": {"word": value}}}


@pytest.mark.parametrize("name", ["chatml", "llama", "deepseek", "thinking", "mistral", "harmony"])
def test_extend_continues_token_by_token(name):
    tokenizer = PLAIN[name]
    messages = [{"role": "user", "content": "hi"}]
    rendered = render(tokenizer, messages, add_generation_prompt=True)
    for turn in range(3):
        words = "\n</think>\n\nhello" if name == "thinking" else " hello" if name == "mistral" else "hello"
        words = "<|channel|>final<|message|>hello" if name == "harmony" else words
        end = {"harmony": "<|end|>"}.get(name, tokenizer.eos_token)
        letters = (
            [i for c in words for i in tokenizer(c)["input_ids"]]
            if name != "harmony"
            else tokenizer(words)["input_ids"]
        )
        sampled = [*letters, tokenizer.convert_tokens_to_ids(end)]
        before = rendered
        rendered = rendered.generated(sampled, {"role": "assistant", "content": "hello"})
        rendered = extend(rendered, [{"role": "user", "content": f"more {turn}"}])
        assert rendered.ids[: len(before.ids) + len(sampled)] == before.ids + sampled
        messages += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": f"more {turn}"}]
        new = tokenizer.decode(rendered.ids[len(before.ids) + len(sampled) :])
        assert render(tokenizer, messages, add_generation_prompt=True).text.endswith(new)
        assert sum(rendered.assistant_mask) == sum(before.assistant_mask) + len(sampled)
    if name != "thinking":  # which would have dropped the earlier thinking
        assert rendered.text == render(tokenizer, messages, add_generation_prompt=True).text


def test_a_turn_cut_off_by_length_is_closed_untrained():
    tokenizer = PLAIN["chatml"]
    prompt = render(tokenizer, TALK[:1], add_generation_prompt=True)
    longer = extend(prompt.generated(tokenizer("hel")["input_ids"]), TALK[2:3])
    assert (
        longer.text
        == render(
            tokenizer, [TALK[0], {"role": "assistant", "content": "hel"}, TALK[2]], add_generation_prompt=True
        ).text
    )
    assert tokenizer.decode([i for i, m in zip(longer.ids, longer.assistant_mask, strict=True) if m]) == "hel"


def test_tool_results_follow_a_call():
    tokenizer = PLAIN["thinking"]
    prompt = render(tokenizer, TALK[:1], add_generation_prompt=True)
    turn = {"role": "assistant", "content": "", "tool_calls": [call("x")]}
    sampled = tokenizer("\n</think>\n\n<tool_call>\n<function=look>...</function>\n</tool_call><|im_end|>")["input_ids"]
    longer = extend(prompt.generated(sampled, turn), [TOOL, TOOL])
    assert longer.text.endswith(
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n42\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    )


SAMPLED_STOPS = [
    # template, what was said, the token that stopped the model, who speaks next, how what the template adds begins
    ("glm", "hi", "<|user|>", "user", "\nbye"),
    ("glm", "hi", "<|observation|>", "user", "<|user|>\nbye"),
    ("glm", "hi", "", "user", "<|user|>\nbye"),
    ("glm", "CALL", "<|observation|>", "tool", "\n<tool_response>"),
    ("glm", "CALL", "", "tool", "<|observation|>\n<tool_response>"),
    ("harmony", "hi", "<|return|>", "user", "<|start|>user"),
    ("harmony", "hi", "<|end|>", "user", "<|start|>user"),
    ("harmony", "hi", "", "user", "<|end|><|start|>user"),
    ("harmony", "CALL", "<|call|>", "tool", "<|start|>tool"),
    ("chatml", "hi", "<|im_end|>", "user", "\n<|im_start|>user"),
    ("chatml", "hi", "<|endoftext|>", "user", "\n<|im_start|>user"),
    ("chatml", "CALL", "<|im_end|>", "tool", "\n<|im_start|>tool"),
    ("llama", "hi", "<|eot_id|>", "user", "<|start_header_id|>user"),
    ("mistral", " hi", "</s>", "user", "[INST] bye"),
    ("deepseek", "hi", "<｜end▁of▁sentence｜>", "user", "<｜User｜>bye"),
]


@pytest.mark.parametrize(("name", "said", "stop", "role", "expected"), SAMPLED_STOPS)
@pytest.mark.parametrize("known", [True, False])
def test_the_token_that_stopped_the_model_is_written_once(name, said, stop, role, expected, known):
    tokenizer = PLAIN[name]
    stops = [s for s in TEMPLATES[name][1] if s in expected or s == stop] if known else None
    prompt = render(tokenizer, TALK[:1], add_generation_prompt=True, stop_tokens=stops)
    turn = {"role": "assistant", "content": said.strip()}
    if said == "CALL":
        turn = {"role": "assistant", "content": "", "tool_calls": [call("x")]}
        said = render(tokenizer, [TALK[0], turn]).spans[0]
        said = render(tokenizer, [TALK[0], turn]).text[said.start : said.end].removesuffix(stop)
    sampled = tokenizer(said + stop)["input_ids"]
    longer = extend(prompt.generated(sampled, turn), [{"role": role, "content": "bye"}])
    added = longer.text.removeprefix(prompt.text + said + stop)
    assert len(added) < len(longer.text)
    assert added.startswith(expected)
    assert longer.ids[: len(prompt.ids) + len(sampled)] == prompt.ids + sampled
    assert longer.assistant_mask == [False] * len(prompt.ids) + [True] * len(sampled) + [False] * (
        len(longer.ids) - len(prompt.ids) - len(sampled)
    )


def test_extend_without_a_prompt_or_render_is_refused():
    rendered = render(PLAIN["chatml"], TALK)
    with pytest.raises(ValueError, match="add_generation_prompt=True"):
        rendered.generated([1])
