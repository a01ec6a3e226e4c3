"""Exports of a running engine, on one rank and two: a vision-language checkpoint with experts comes out whole."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from engines import EngineConfig, build_engine
from engines.launch import ensure_group
from engines.proofs.family_cases import CASES
from engines.proofs.forked_ranks import launch_forked
from engines.testing.assembled import assemble
from engines.tiny import tiny_batch
from objectives import SFT

MTP = {"mtp.fc.weight": torch.ones(32, 64), "mtp.norm.weight": torch.arange(32).bfloat16()}
VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
VISION |= {"patch_size": 4, "num_position_embeddings": 16}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bfloat16, with a head for further tokens."""
    path = tmp_path_factory.mktemp("stock")
    text = next(case for case in CASES if case.model_type == "qwen3_5_moe_text").config().to_dict()
    text |= {"mtp_num_hidden_layers": 1}
    config = AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=VISION)
    AutoModelForImageTextToText.from_config(config).to(torch.bfloat16).save_pretrained(path)
    save_file(load_file(path / "model.safetensors") | MTP, path / "model.safetensors", metadata={"format": "pt"})
    return path


def train_and_export(path: Path, target: Path) -> tuple[Any, ...]:
    engine = build_engine(EngineConfig(model=str(path), device="cpu", lr=0.1, max_tokens_per_rank=20))
    untouched = assemble(engine.export_weights())
    engine.train_batch(tiny_batch([7, 12, 5]), SFT())
    engine.save_hf(target)
    live = {part.name: part.dtype for part in engine.export_weights(live=True)}
    return untouched, assemble(engine.export_weights(max_bytes=100)), live


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trained_checkpoint_comes_out_whole(checkpoint: Path, tmp_path: Path, world_size: int) -> None:
    if world_size == 1:
        ensure_group("cpu")
    before, after, live = launch_forked(
        train_and_export, (checkpoint, tmp_path / "export"), world_size=world_size, device="cpu"
    )
    if world_size == 1:
        torch.distributed.destroy_process_group()
    stock, written = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "export/model.safetensors")
    assert set(stock) == set(before) == set(after) == set(written)
    carried = {name for name in stock if name in MTP or name.startswith("model.visual.")}
    for name, tensor in stock.items():
        assert before[name].dtype == after[name].dtype == written[name].dtype == tensor.dtype, name
        assert torch.equal(before[name], tensor), name
        assert torch.equal(after[name], written[name]), name
        assert torch.equal(written[name], tensor) == (name in carried), name
    assert set(live.values()) == {torch.float32}
    assert "model.layers.0.mlp.experts.gate_up_proj" in live
    assert not [name for name in live if "language_model" in name]
    assert json.loads((tmp_path / "export/config.json").read_text())["text_config"]["mtp_num_hidden_layers"] == 1
    text = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert torch.equal(text.model.norm.weight, written["model.language_model.norm.weight"])
