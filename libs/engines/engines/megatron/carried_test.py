"""What Megatron does not train is carried bit for bit: further-token heads, and the images' tower of a text run.

A checkpoint as published ones are: vision-language, `model.language_model.*`, `mtp.*`, in bfloat16.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from engines import EngineConfig, build_engine
from engines.megatron.runtime.process_groups import release
from engines.proofs.family_cases import CASES
from engines.proofs.forked_ranks import launch_forked
from engines.testing.assembled import assemble
from engines.tiny import tiny_batch
from objectives import SFT

VISION = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
VISION |= {"patch_size": 4, "num_position_embeddings": 16}
MTP = {
    "mtp.fc.weight": torch.linspace(-1, 1, 32 * 64).view(32, 64).bfloat16(),
    "mtp.layers.0.mlp.experts.0.gate_proj.weight": torch.full((3, 2), 1 / 3),  # float32 among bfloat16
    "mtp.norm.weight": torch.arange(32).bfloat16(),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2": {"tensor_parallel": 2, "expert_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
}


Exports = dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]  # before and after a step, by layout


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stock")
    text = next(case for case in CASES if case.model_type == "qwen3_5_moe_text").config().to_dict()
    text |= {"mtp_num_hidden_layers": 1}
    torch.manual_seed(0)  # some decays are so fast that a step in bfloat16 leaves them as they are
    config = AutoConfig.for_model("qwen3_5_moe", text_config=text, vision_config=VISION)
    AutoModelForImageTextToText.from_config(config).to(torch.bfloat16).save_pretrained(path)
    save_file(load_file(path / "model.safetensors") | MTP, path / "model.safetensors", metadata={"format": "pt"})
    return path


def two_ranks(path: Path, target: Path) -> Exports:
    out = {}
    for name, sizes in LAYOUTS.items():
        config = EngineConfig(
            model=str(path), backend="megatron", device="cpu", lr=0.1, max_tokens_per_rank=20, **sizes
        )
        engine = build_engine(config)
        before = assemble(engine.export_weights())
        engine.train_batch(tiny_batch([7, 12, 5]), SFT())
        engine.save_hf(target / name)
        out[name] = before, assemble(engine.export_weights(max_bytes=100))
        release()
    return out


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Exports, Path]:
    folder = tmp_path_factory.mktemp("exports")
    return launch_forked(two_ranks, (checkpoint, folder), world_size=2), folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_trained_checkpoint_comes_out_whole_with_the_bytes_of_what_was_not_trained(
    checkpoint: Path, exported: tuple[Exports, Path], name: str
) -> None:
    (before, after), folder = exported[0][name], exported[1]
    stock, written = load_file(checkpoint / "model.safetensors"), load_file(folder / name / "model.safetensors")
    carried = {tensor for tensor in stock if tensor in MTP or tensor.startswith("model.visual.")}
    assert len(carried) > len(MTP)
    assert any(tensor.startswith("model.language_model.layers.0.") for tensor in stock)
    assert set(stock) == set(before) == set(after) == set(written)
    for tensor, value in stock.items():
        assert before[tensor].dtype == after[tensor].dtype == written[tensor].dtype == value.dtype, tensor
        assert torch.equal(before[tensor], value), tensor
        assert torch.equal(after[tensor], written[tensor]), tensor
        assert torch.equal(written[tensor], value) == (tensor in carried), tensor
