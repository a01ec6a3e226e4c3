"""An adapter of a vision-language checkpoint loads by peft over the checkpoint's own class and over its text part."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engines import EngineConfig, LoraConfig, build_engine
from engines.loading import load_model
from engines.testing.adapter_classes import assert_peft_agrees, stock_classes
from engines.testing.model_directories import gemma3_as_published, gemma3_vision
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_model

LORA = LoraConfig(rank=3)


@pytest.mark.parametrize("vision", ["off", "frozen"])
@pytest.mark.parametrize("kind", ["vision", "vision_moe"])
def test_over_both_classes(kind: str, vision: Literal["off", "frozen"], tmp_path: Path) -> None:
    model: Any = tiny_model(kind, scale=2.0)
    model.save_pretrained(tmp_path / "base")
    config = EngineConfig(model=str(tmp_path / "base"), device="cpu", lr=5e-2, lora=LORA, vision=vision)
    assert_peft_agrees(build_engine(config), stock_classes(tmp_path / "base"), tmp_path / "adapter")


@pytest.mark.parametrize("make", [gemma3_vision, gemma3_as_published])
def test_a_tower_with_layers_of_the_same_names_is_left_alone(make: Any, tmp_path: Path) -> None:
    make(tmp_path / "base")
    config = EngineConfig(model=str(tmp_path / "base"), device="cpu", lr=5e-2, lora=LORA)
    own = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    text = load_model(EngineConfig(model=str(tmp_path / "base"), device="cpu")).eval()
    assert [type(one).__name__ for one in (own, text)] == ["Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"]
    assert_peft_agrees(build_engine(config), [own, text], tmp_path / "adapter")


def test_the_adapter_of_a_text_model_has_one_name_a_layer(tmp_path: Path) -> None:
    model: Any = tiny_model("dense", scale=2.0)
    model.save_pretrained(tmp_path / "base")
    config = EngineConfig(model=str(tmp_path / "base"), device="cpu", lr=5e-2, lora=LORA)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    assert_peft_agrees(build_engine(config), [stock], tmp_path / "adapter")
    assert not [name for name in load_file(tmp_path / "adapter/adapter_model.safetensors") if "language" in name]
    assert isinstance(json.loads((tmp_path / "adapter/adapter_config.json").read_text())["target_modules"], list)
