"""Weights go through megatron-core's distributed checkpoint from TP2·PP2 to other layouts, and into its own model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch import Tensor

from engines import EngineConfig, build_engine
from engines.megatron.core_checkpoint import load_core_checkpoint, save_core_checkpoint
from engines.megatron.runtime.process_groups import release
from engines.proofs.forked_ranks import launch_forked
from engines.proofs.megatron_layouts import LENGTHS, LayoutCase, engine_of, exported_by
from engines.testing.same_runs import assert_same_bits
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT

WIDE = {"tensor_parallel": 2, "pipeline_parallel": 2}
VIRTUAL = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}
MODELS = ("Qwen3.5 MoE", "Qwen3.5", "Qwen3", "Qwen3 MoE, raw top k, tied")


Weights = dict[str, Tensor]
Read = dict[str, tuple[Weights, Weights, Weights]]  # before loading, after it, and after a step
Travelled = tuple[Path, dict[str, Weights], Read, Read]


def written(folder: Path) -> dict[str, Weights]:
    """Trains on TP2·PP2 and saves; what the engine exports then."""
    out = {}
    for model in MODELS:
        engine = engine_of(LayoutCase(model, WIDE))
        engine.train_batch(tiny_batch(list(LENGTHS), seed=0), SFT())
        save_core_checkpoint(engine, folder / model)
        out[model] = exported_by(engine)
        release()
    return out


def read(folder: Path, sizes: dict[str, Any], again: str) -> Read:
    """What engines of other weights export before and after loading; they save what they have then."""
    out = {}
    for model in MODELS:
        fitting = sizes if "MoE" in model else {name: size for name, size in sizes.items() if name != "expert_parallel"}
        engine = engine_of(LayoutCase(model, fitting), seed=1)
        before = exported_by(engine)
        load_core_checkpoint(engine, folder / model)
        loaded = exported_by(engine)
        save_core_checkpoint(engine, folder / again / model)
        engine.train_batch(tiny_batch(list(LENGTHS), seed=0), SFT())
        out[model] = before, loaded, exported_by(engine)
        release()
    return out


@pytest.fixture(scope="module")
def travelled(tmp_path_factory: pytest.TempPathFactory) -> Travelled:
    folder = tmp_path_factory.mktemp("core")
    first = launch_forked(written, (folder,), world_size=4)
    there = launch_forked(read, (folder, {"expert_parallel": 2}, "there"), world_size=2)
    back = launch_forked(read, (folder / "there", VIRTUAL, "back"), world_size=2)
    return folder, first, there, back


@pytest.mark.parametrize("model", MODELS)
def test_every_bit_arrives_on_another_layout(travelled: Travelled, model: str) -> None:
    _, first, *readers = travelled
    for results in readers:
        before, loaded, trained = results[model]
        assert any(not torch.equal(value, first[model][name]) for name, value in before.items())
        assert_same_bits(first[model], loaded)
        assert any(not torch.equal(value, loaded[name]) for name, value in trained.items())


def test_the_names_are_those_of_megatron_core(travelled: Travelled) -> None:
    names = set(dist_checkpointing.load_tensors_metadata(str(travelled[0] / "Qwen3.5")))
    delta, full = "decoder.layers.0.self_attention.", "decoder.layers.1.self_attention."
    want = {f"{delta}in_proj.weight.{part}" for part in ("query", "key", "value", "z", "beta", "alpha")}
    want |= {f"{delta}conv1d.weight.{part}" for part in ("query", "key", "value")}
    want |= {
        f"{delta}{x}" for x in ("A_log", "dt_bias", "out_norm.weight", "out_proj.weight", "in_proj.layer_norm_weight")
    }
    want |= {f"{full}{x}.weight" for x in ("linear_qkv", "linear_proj", "q_layernorm", "k_layernorm")}
    want |= {
        f"{full}linear_qkv.layer_norm_weight",
        "embedding.word_embeddings.weight",
        "decoder.final_layernorm.weight",
    }
    want |= {f"decoder.layers.{i}.mlp.linear_fc{n}.weight" for i in (0, 1) for n in (1, 2)}
    want |= {f"decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight" for i in (0, 1)}
    written = {name for name in names if ".layers." not in name or name.split(".")[2] in "01"}
    assert written == want


def test_refusals(tmp_path: Path) -> None:
    plain = build_engine(EngineConfig(device="cpu"), tiny_model())
    with pytest.raises(ValueError, match="backend='megatron'"):
        save_core_checkpoint(plain, tmp_path)


def no_writer(folder: Path) -> None:
    """Saving where psutil is not installed, as megatron-core sees it."""
    filesystem_async.HAVE_PSUTIL = False
    save_core_checkpoint(engine_of(LayoutCase("Qwen3", {})), folder)


def test_a_writer_that_would_never_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"psutil.*pip install 'tessera-engines\[megatron\]'"):
        launch_forked(no_writer, (tmp_path / "new",))
    assert not (tmp_path / "new").exists()
