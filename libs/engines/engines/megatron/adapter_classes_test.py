"""An adapter that Megatron trained on a vision-language checkpoint loads by peft over both of its classes."""

from pathlib import Path
from typing import Any, Literal

import pytest

from engines import EngineConfig, LoraConfig, build_engine
from engines.testing.adapter_classes import assert_peft_agrees, stock_classes
from engines.testing.one_megatron_rank import one_megatron_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_model


@pytest.mark.parametrize("vision", ["off", "frozen"])
def test_over_both_classes(vision: Literal["off", "frozen"], tmp_path: Path) -> None:
    model: Any = tiny_model("vision", scale=2.0)
    model.save_pretrained(tmp_path / "base")
    config = EngineConfig(
        backend="megatron", model=str(tmp_path / "base"), device="cpu", lr=5e-2, lora=LoraConfig(rank=3), vision=vision
    )
    assert_peft_agrees(build_engine(config), stock_classes(tmp_path / "base"), tmp_path / "adapter")
