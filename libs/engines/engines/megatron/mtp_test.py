"""The head for multi-token prediction under Megatron: the steps, gradients and weights of one FSDP2 process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from engines import EngineConfig, build_engine
from engines.megatron.core_checkpoint import save_core_checkpoint
from engines.megatron.runtime.process_groups import release
from engines.mtp.head import add_head
from engines.proofs.forked_ranks import launch_forked
from engines.testing.executors import weights
from engines.testing.one_megatron_rank import one_megatron_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch, tiny_model
from objectives import GRPO

LENGTHS = [7, 3, 12, 5, 9, 2, 14, 6, 4]
UNTIED = {"tie_word_embeddings": False}
TP_PP = {"tensor_parallel": 2, "pipeline_parallel": 2}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "data parallel": ("dense", {}, {}),
    "TP2 PP2, tied": ("dense", {}, TP_PP),
    "TP2 PP2, untied": ("dense", UNTIED, TP_PP),
    "PP2, two virtual stages, untied": ("dense", UNTIED, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}),
    "PP2, shared sequences, untied": ("dense", UNTIED, {"pipeline_parallel": 2, "context_parallel": "static:2"}),
    "TP2 EP2": ("moe", {}, {"tensor_parallel": 2, "expert_parallel": 2, "distributed_optimizer": True}),
    "PP2 EP2, router's loss": ("moe", {}, {"pipeline_parallel": 2, "expert_parallel": 2, "router_aux_loss_coef": 0.5}),
    "recomputed": ("dense", {}, {"gradient_checkpointing": True, "tensor_parallel": 2}),
}
ALONE = ("router_aux_loss_coef",)
"""Options that are no layout."""


def engine(name: str, backend: str, seed: int = 0, **changed: Any) -> Any:
    kind, sizes, options = CASES[name]
    if backend == "fsdp2":
        options = {key: value for key, value in options.items() if key in ALONE}
    made: Any = tiny_model(kind, seed=seed, scale=2.0, mtp_num_hidden_layers=1, vocab_size=49, **sizes)
    add_head(made)
    with torch.no_grad():
        for parameter in made.mtp.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    config = {"device": "cpu", "lr": 1e-2, "eps": 1e-2, "max_tokens_per_rank": 20, "mtp_loss_scaling_factor": 0.5}
    return build_engine(EngineConfig(backend=backend, **{**config, **options, **changed}), made)


def curve(built: Any) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    return [built.train_batch(tiny_batch(LENGTHS, seed=step), GRPO()) for step in range(2)], weights(built)


def every() -> dict[str, Any]:
    out = {}
    for name in CASES:
        out[name] = curve(engine(name, "megatron"))
        release()
    return out


@pytest.fixture(scope="module")
def four() -> dict[str, Any]:
    found: dict[str, Any] = launch_forked(every, (), world_size=4)
    return found


def assert_same(one: Any, other: Any) -> None:
    for left, right in zip(one[0], other[0], strict=True):
        for key in ("loss", "mtp_loss", "mtp_accuracy", "grad_norm", "trained_tokens"):
            assert right[key] == pytest.approx(left[key], rel=2e-4, abs=1e-5), key
    assert one[1].keys() == other[1].keys()
    for name, tensor in one[1].items():
        torch.testing.assert_close(other[1][name], tensor, rtol=2e-3, atol=5e-5, msg=lambda text: f"{name}: {text}")  # noqa: B023


@pytest.mark.parametrize("name", list(CASES))
def test_every_layout_gives_the_steps_of_one_fsdp2_process(name: str, four: dict[str, Any]) -> None:
    assert_same(curve(engine(name, "fsdp2")), four[name])


def test_one_process_and_the_other_backends_checkpoint(tmp_path: Path) -> None:
    """Each goes on from what the other wrote, and both export the same names."""
    name = "TP2 EP2"
    layout = {"tensor_parallel": 1, "expert_parallel": 1}
    first = engine(name, "megatron", **layout)
    assert_same(curve(engine(name, "fsdp2")), curve(first))
    first.save(tmp_path / "megatron")
    first.save_hf(tmp_path / "export")
    with pytest.raises(ValueError, match="multi-token prediction has other names"):
        save_core_checkpoint(first, tmp_path / "core")
    resumed = engine(name, "fsdp2", seed=1)
    resumed.load(tmp_path / "megatron")
    for name_, tensor in weights(first).items():
        assert torch.equal(weights(resumed)[name_], tensor), name_
    files = load_file(tmp_path / "export/model.safetensors")
    resumed.save_hf(tmp_path / "other")
    assert files.keys() == load_file(tmp_path / "other/model.safetensors").keys()
    assert "mtp.layers.0.mlp.experts.3.down_proj.weight" in files
    assert dist.get_world_size() == 1


def test_no_bit_of_the_models_weights_changes() -> None:
    """By steps whose gradients are not clipped, beside an engine without the head."""
    found = []
    for factor in (0.5, None):
        made: Any = tiny_model("moe", scale=2.0, mtp_num_hidden_layers=1)
        config = EngineConfig(backend="megatron", device="cpu", lr=1e-2, eps=1e-3, grad_clip=None)
        built = build_engine(replace(config, mtp_loss_scaling_factor=factor), made)
        curve_, tensors = curve(built)
        found.append(tensors)
        assert ("mtp_loss" in curve_[0]) is (factor is not None)
    own, plain = found
    assert {name for name in own if not name.startswith("mtp.")} == plain.keys()
    assert all(torch.equal(own[name], tensor) for name, tensor in plain.items())


def test_images_are_refused() -> None:
    with pytest.raises(ValueError, match="last stage sees no images"):
        build_engine(EngineConfig(backend="megatron", device="cpu", vision="frozen", mtp_loss_scaling_factor=0.1), None)
