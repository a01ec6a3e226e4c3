"""Adapters on experts under Megatron: any layout gives the steps, files and exports of one FSDP2 process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engines import EngineConfig, LoraConfig, TrainEngine, base_policy, save_adapter
from engines.capability import refuse_unsupported
from engines.megatron.runtime.process_groups import release
from engines.proofs.forked_ranks import launch_forked
from engines.proofs.megatron_layouts import (
    LENGTHS,
    LayoutCase,
    engine_of,
    exported_by,
    largest_difference,
)
from engines.tiny import tiny_batch
from objectives import SFT

EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
LORA = LoraConfig(rank=3, alpha=7.0, targets=("q_proj", "out_proj"), target_parameters=EXPERTS)
ALONE: dict[str, LoraConfig] = {
    "Qwen3.5 MoE": LORA,
    "Qwen3 MoE, raw top k, tied": replace(LORA, targets=("o_proj",), target_parameters=EXPERTS[1:]),
}
CASES = (
    LayoutCase("Qwen3.5 MoE", {}),
    LayoutCase("Qwen3.5 MoE", {"tensor_parallel": 2}),
    LayoutCase("Qwen3.5 MoE", {"tensor_parallel": 2, "expert_parallel": 4, "gradient_checkpointing": True}),
    LayoutCase("Qwen3.5 MoE", {"expert_parallel": 2, "distributed_optimizer": True}),
    LayoutCase("Qwen3.5 MoE", {"pipeline_parallel": 2, "expert_parallel": 2}),
    LayoutCase("Qwen3 MoE, raw top k, tied", {"tensor_parallel": 2, "pipeline_parallel": 2, "expert_parallel": 2}),
)
STEPS = 2
Found = dict[str, Any]


def run(case: LayoutCase, backend: str, folder: Path, load: Path | None = None) -> Found:
    """Two steps, what is exported and saved after them, and a step more: from `load` where it is given."""
    lora = ALONE[case.model]
    engine = engine_of(case, backend, lora=lora)
    out: Found = {"losses": [step(engine, seed) for seed in range(STEPS)], "weights": exported_by(engine)}
    with base_policy(engine) as base:
        out["base"] = base.forward(tiny_batch(list(LENGTHS)))["log_probs"].values()
    save_adapter(engine, folder / "adapter")
    engine.save(folder / "saved")
    out["adapter"] = load_file(folder / "adapter" / "adapter_model.safetensors")
    if load is not None:
        engine = engine_of(case, backend, seed=1, lora=lora)
        engine.load(load)
    out["next"] = step(engine, STEPS), exported_by(engine)
    return out


def step(engine: TrainEngine, seed: int) -> float:
    return engine.train_batch(tiny_batch(list(LENGTHS), seed=seed), SFT())["loss"]


def alone(folder: Path) -> dict[str, Found]:
    return {name: run(LayoutCase(name), "fsdp2", folder / f"fsdp2 {name}") for name in ALONE}


def on_four(folder: Path) -> dict[str, Found]:
    out = {}
    for number, case in enumerate(CASES):
        out[str(case)] = run(case, "megatron", folder / str(number), folder / f"fsdp2 {case.model}" / "saved")
        release()
    return out


def resumed(folder: Path) -> float:
    engine = engine_of(CASES[0], "fsdp2", seed=1, lora=LORA)
    engine.load(folder / "2" / "saved")
    return step(engine, STEPS)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Found], dict[str, Found], float]:
    folder = tmp_path_factory.mktemp("experts")
    one = launch_forked(alone, (folder,))
    four = launch_forked(on_four, (folder,), 4)
    return one, four, launch_forked(resumed, (folder,))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_gives_the_steps_and_files_of_one_process(
    found: tuple[dict[str, Found], dict[str, Found], float], case: LayoutCase
) -> None:
    want, got = found[0][case.model], found[1][str(case)]
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-5)
    assert got["next"][0] == pytest.approx(want["next"][0], rel=1e-5)
    torch.testing.assert_close(got["base"], want["base"], atol=1e-5, rtol=0)
    for mine, other in (
        (want["adapter"], got["adapter"]),
        (want["weights"], got["weights"]),
        (want["next"][1], got["next"][1]),
    ):
        assert largest_difference(mine, other) < 2e-5
    experts = {name: value for name, value in got["adapter"].items() if ".experts." in name}
    assert len(experts) == 4 * 2 * len(ALONE[case.model].target_parameters)
    assert all(value.abs().sum() > 0 for value in experts.values())


def test_fsdp2_goes_on_with_what_megatron_saved(found: tuple[dict[str, Found], dict[str, Found], float]) -> None:
    assert found[2] == pytest.approx(found[0]["Qwen3.5 MoE"]["next"][0], rel=1e-5)


def test_experts_that_are_cut_are_refused() -> None:
    config = EngineConfig(backend="megatron", expert_tensor_parallel=2, lora=LORA)
    with pytest.raises(ValueError, match=r"adapters on experts, .* leave expert_tensor_parallel at 1"):
        refuse_unsupported(config)
