"""The tiny model and its tokenizer, read back from an ordinary Hugging Face directory."""

from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, Qwen3_5ForCausalLM

from apps.quickstart.arithmetic import addition
from apps.quickstart.demonstrations import demonstration
from apps.quickstart.model import save_tiny_model
from apps.quickstart.tokenizer import MARKERS, WORDS

TOOLS = [{"type": "function", "function": {"name": "calculator", "parameters": {"properties": {"expression": {}}}}}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory)


def test_it_is_a_small_hybrid_qwen(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert isinstance(model, Qwen3_5ForCausalLM)
    assert model.config.layer_types == ["linear_attention", "full_attention"] * 2
    assert sum(p.numel() for p in model.parameters()) < 250_000


def test_the_seed_makes_the_model_and_leaves_the_random_state_alone(directory: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    save_tiny_model(tmp_path / "one", seed=1)
    assert torch.equal(torch.rand(1), expected)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "one")
    same = AutoModelForCausalLM.from_pretrained(save_tiny_model(tmp_path / "zero", seed=0))
    first = AutoModelForCausalLM.from_pretrained(directory)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_gated_delta_nets_start_with_a_memory_longer_than_a_prompt(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    steps = torch.nn.functional.softplus(model.model.layers[0].linear_attn.dt_bias)
    assert 0.0009 < steps.min() <= steps.max() < 0.11


@pytest.mark.parametrize("text", [*MARKERS, *WORDS])
def test_markers_and_fixed_words_are_single_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert len(tokenizer(text)["input_ids"]) == 1


def test_any_text_survives_the_round_trip(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "h\u00e9llo \u4f60 <tool_call>\n user<|im_end|> 0123456789\t"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_a_tool_conversation_reads_as_qwen_writes_it(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = demonstration(addition(37, 58), "calculator")
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    assert text == (
        "<|im_start|>system\n<tools>\ncalculator(expression)\n</tools><|im_end|>\n"
        "<|im_start|>user\n37+58=<|im_end|>\n"
        "<|im_start|>assistant\n<tool_call>\n<function=calculator>\n<parameter=expression>\n37+58\n</parameter>\n"
        "</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n95\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n\\boxed{95}<|im_end|>\n"
    )


def test_a_prompt_is_the_start_of_its_conversation(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = demonstration(addition(1, 2), "arithmetic")
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.apply_chat_template(messages, tokenize=False).startswith(prompt)


def test_a_late_system_message_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]
    with pytest.raises(jinja2.TemplateError, match="must be the first"):
        tokenizer.apply_chat_template(messages, tokenize=False)
