"""Casting a model leaves its rotary frequencies; what cannot be loaded says why."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from engines import EngineConfig
from engines.loading import cast_parameters, load, load_model
from engines.tiny import tiny_config, tiny_model


def test_casting_parameters_leaves_buffers() -> None:
    """`model.to(bfloat16)` would round rotary frequencies, and with them every position."""
    model: Any = tiny_model("attention")
    before = model.model.rotary_emb.inv_freq.clone()
    cast_parameters(model, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_the_master_dtype_is_that_of_parameters(master: Literal["float32", "bfloat16"], tmp_path: Path) -> None:
    stored: Any = tiny_model("dense")
    stored.save_pretrained(tmp_path)
    for module in (
        load_model(EngineConfig(model=str(tmp_path), master_dtype=master)),
        load_model(EngineConfig(master_dtype=master), tiny_model("dense")),
        load_model(EngineConfig(master_dtype=master), tiny_config("dense")),
    ):
        assert {parameter.dtype for parameter in module.parameters()} == {getattr(torch, master)}
        assert {buffer.dtype for buffer in module.buffers()} == {torch.float32}
        assert module.lm_head.weight is module.model.embed_tokens.weight


def test_the_dtypes_of_exports_are_those_before_the_cast() -> None:
    weights = load(EngineConfig(), tiny_model("attention").to(torch.bfloat16)).weights
    assert set(weights.dtypes.values()) == {torch.bfloat16}


@pytest.mark.parametrize(
    ("config", "model", "words"),
    [
        (EngineConfig(), None, "no model"),
        (EngineConfig(model="somewhere"), tiny_config(), "not both"),
        (EngineConfig(model="/nowhere/at/all"), None, "no model directory"),
        (EngineConfig(), torch.nn.Linear(1, 1), "not a transformers causal LM"),
        (EngineConfig(), "qwen", "must be a module or a transformers config"),
    ],
)
def test_what_cannot_be_loaded(config: EngineConfig, model: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_model(config, model)


@pytest.mark.parametrize("text", ['{"model_type": "qwen3", "hidden_size": "wide"}', '{"hidden_size": 3}', "{", "[]"])
def test_a_broken_config_is_a_value_error_that_names_the_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json|model_type"):
        load_model(EngineConfig(model=str(tmp_path)))
