"""Sizes of a user's model come from its config.json, and hold what the module has, or are refused with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from engines import EngineConfig
from runplan import PlainCluster, RunSpec, make_plan, memory
from runplan.model.model_shape import count_parameters
from runplan.model.own_model import own_model

SMALL: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
CONFIGS = ("LlamaConfig", "Qwen2Config", "MistralConfig", "Qwen3Config", "Qwen3MoeConfig", "Qwen3_5TextConfig")


def saved(folder: Path, name: str, **settings: Any) -> Path:
    config = getattr(transformers, name)(**SMALL, **settings)
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_the_count_is_the_modules_within_a_hundredth(name: str, tmp_path: Path) -> None:
    path = saved(tmp_path, name)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
    shape = own_model(path)
    counted = sum(parameter.numel() for parameter in module.parameters())
    assert count_parameters(shape).total == pytest.approx(counted, rel=0.01)
    assert (shape.layers, shape.source) == (4, str(path / "config.json"))


def test_a_plan_of_it_has_memory_layers_and_time(tmp_path: Path) -> None:
    path = saved(tmp_path, "Qwen3Config")
    engine = EngineConfig(device="cuda", backend="megatron", pipeline_parallel=2)
    spec = RunSpec("sft", "any", engine, PlainCluster(), 4, steps=1, rows=8, longest=64, own=own_model(path))
    sections = make_plan(spec).sections
    config = transformers.AutoConfig.from_pretrained(path)
    peak = memory(engine, config, ranks=4)
    assert sections["Memory"][-1].startswith(f"{peak.bytes / 2**30:.1f} GiB at the fullest moment")
    assert sections["Stages"][0] == "2 + 2 layers over 2 stages"
    assert "Time" in sections
    assert sections["Model"][0].startswith(f"{path.name}: ")


def test_what_cannot_be_counted_is_refused_with_the_reason(tmp_path: Path) -> None:
    path = saved(tmp_path / "mixed", "Qwen3MoeConfig", mlp_only_layers=[0, 1], intermediate_size=4096)
    with pytest.raises(ValueError, match="memory of 'qwen3_moe' is not planned: its layers would count as"):
        own_model(path)
    text = saved(tmp_path / "text", "Qwen3Config")
    with pytest.raises(ValueError, match="the vision tower of 'qwen3' has no plan"):
        own_model(text, sees=True)
    (text / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": "wide"}))
    with pytest.raises(ValueError, match="cannot be read"):
        own_model(text)


@pytest.mark.parametrize("name", ["nobody/nothing-3B", "nowhere", "a/b/c"])
def test_a_name_that_is_not_in_the_cache_says_what_to_do(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} is no directory here, nor in the hub's cache.*hf download {name}"):
        own_model(Path(name))


def test_a_name_in_the_cache_is_read_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--somebody--small"
    saved(repository / "snapshots" / ("0" * 40), "Qwen3Config")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    assert own_model(Path("somebody/small")).name == "small"
