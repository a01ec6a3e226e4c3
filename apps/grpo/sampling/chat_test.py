"""The chat of a run: where its model stops, and how it writes tool calls."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from apps.grpo.config import DataConfig, GrpoConfig, PluginConfig
from apps.grpo.preflight import check_prompts
from apps.grpo.recipes.math import make_tasks
from apps.grpo.sampling.chat import chat_of
from apps.grpo.testing.recipe import RECIPE
from apps.quickstart.tokenizer import build_tokenizer
from chat_tools import find_format
from chat_tools.conformance.real_templates import real_tokenizer
from chat_tools.testing.samples import write_turn
from rollout import Tool


@pytest.mark.parametrize("name", ["glm4moe", "gptoss", "qwen3"])
def test_a_model_stops_where_its_generation_config_says(name: str, tmp_path: Path) -> None:
    tokenizer = real_tokenizer(name)
    stops = {"glm4moe": ["<|user|>", "<|observation|>"], "gptoss": ["<|return|>", "<|call|>"], "qwen3": ["<|im_end|>"]}
    ids = tokenizer.convert_tokens_to_ids(stops[name])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert list(chat_of(RECIPE.config, tokenizer, tmp_path).stop_ids) == ids


def test_without_one_it_stops_at_the_end_of_a_turn(tmp_path: Path) -> None:
    tokenizer = real_tokenizer("qwen3")
    for directory in (None, tmp_path):
        chat = chat_of(RECIPE.config, tokenizer, directory)
        assert chat.stop_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)


FORMS = [("qwen2_5", "hermes"), ("qwen3_5_think", "qwen3_xml"), ("llama3_1", "llama3_json"), ("glm4moe", "glm-4.5")]


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_calls_are_read_as_the_models_template_writes_them(name: str, form: str) -> None:
    tokenizer = real_tokenizer(name)
    chat = chat_of(RECIPE.config, tokenizer)
    assert chat.tool_format == form
    call = ("add", {"a": 3, "b": "four"})
    thought = "</think>\n\n" if "<think>" in chat.prefill else ""
    ids = tokenizer(thought + write_turn(form, [call]), add_special_tokens=False)["input_ids"]
    kinds = {"a": {"type": "integer"}, "b": {"type": "string"}}
    reply = chat.read(ids, False, [Tool("add", "Adds.", {"type": "object", "properties": kinds}, print)])
    assert [(one.name, json.loads(one.arguments)) for one in reply.tool_calls] == [call]
    assert not reply.problems


def test_a_format_that_is_named_is_taken() -> None:
    config = replace(RECIPE.config, plugins=PluginConfig(tool_format="mistral"))
    assert chat_of(config, real_tokenizer("qwen2_5")).tool_format == find_format("mistral")
    with pytest.raises(ValueError, match="hermes"):
        PluginConfig(tool_format="herms")


def test_tools_are_refused_where_no_call_could_be_read(tmp_path: Path) -> None:
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(40)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = build_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    base = GrpoConfig(recipe="math", max_turns=1, data=DataConfig(data=tmp_path / "a.jsonl"))
    check_prompts(base, make_tasks(base, tokenizer), tokenizer)
    for form in (None, "hermes"):
        config = replace(
            base, max_turns=2, plugins=PluginConfig(tool=("apps.grpo.testing.plugins:echo",), tool_format=form)
        )
        tasks = make_tasks(config, tokenizer)
        if form is None:
            with pytest.raises(ValueError, match=r"--tool-format, one of .*hermes"):
                check_prompts(config, tasks, tokenizer)
        else:
            check_prompts(config, tasks, tokenizer)
