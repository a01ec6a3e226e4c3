"""Which tensors of a run did not move: bit by bit, those alone that it trains."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from apps.common.run.idle_steps import IdleRunError
from apps.common.run.moved_weights import check_moved
from engines import EngineConfig
from engines.lora_config import LoraConfig

NAMES = ("model.layers.0.q_proj.weight", "model.layers.0.k_proj.weight", "model.visual.patch.weight")
ALL = EngineConfig(vision="trained")


def write(run_dir: Path, name: str, tensors: dict[str, Tensor]) -> None:
    (run_dir / name).mkdir(parents=True)
    save_file(tensors, run_dir / name / f"{'adapter_' * (name == 'adapter')}model.safetensors")


def run_of(run_dir: Path, moved: dict[str, float], names: tuple[str, ...] = NAMES) -> Path:
    """A run that began with ones and added what `moved` says."""
    write(run_dir, "model", {name: torch.ones(3) for name in names})
    write(run_dir, "export", {name: torch.ones(3) + torch.eye(3)[0] * moved.get(name, 0.0) for name in names})
    (run_dir / "config.json").write_text(json.dumps({"model": str(run_dir / "model")}))
    return run_dir


def test_the_last_bit_of_one_number_counts(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path, dict.fromkeys(NAMES, torch.finfo(torch.float32).eps))
    assert check_moved(run_dir, ALL) == "weights: 3 of 3 trained tensors differ from the start"


def test_what_did_not_move_is_named(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path, {NAMES[0]: 1.0, NAMES[2]: 1.0})
    with pytest.raises(IdleRunError, match=rf"2 of 3 trained tensors .*did not reach: {NAMES[1]}$"):
        check_moved(run_dir, ALL)
    nothing = run_of(tmp_path / "nothing", {})
    with pytest.raises(IdleRunError, match=r"0 of 3 trained tensors .*: model.layers.0.k_proj.weight, model.layers"):
        check_moved(nothing, ALL)


def test_what_is_not_trained_may_stay(tmp_path: Path) -> None:
    """A tower that is frozen or off, rates of 0, and what no adapter is on."""
    run_dir = run_of(tmp_path, dict.fromkeys(NAMES[:2], 1.0))
    for vision in ("off", "frozen"):
        assert "2 of 2 trained" in check_moved(run_dir, EngineConfig(vision=vision))
    assert "2 of 2 trained" in check_moved(run_dir, EngineConfig(vision="trained", learning_rates=("visual=0",)))
    lora = run_of(tmp_path / "lora", {NAMES[0]: 1.0})
    write(lora, "adapter", {f"base_model.model.{NAMES[0].removesuffix('.weight')}.lora_A.weight": torch.ones(1)})
    assert "1 of 1 trained" in check_moved(lora, EngineConfig(lora=LoraConfig(rank=1)))


def test_of_experts_those_with_adapters_have_to_move(tmp_path: Path) -> None:
    before = "model.layers.0.mlp.experts."
    names = tuple(f"{before}{name}" for name in ("0.gate_proj.weight", "0.down_proj.weight", "gate_up_proj"))
    for stacks, trained in ((("experts.gate_up_proj",), 2), (("experts.down_proj", "experts.gate_up_proj"), 3)):
        run_dir = run_of(tmp_path / str(trained), dict.fromkeys(names, 1.0), names)
        inside = ".base_layer" if trained == 3 else ""
        write(run_dir, "adapter", {f"base_model.model.{before[:-1]}{inside}.lora_A.weight": torch.ones(1)})
        lora = LoraConfig(rank=1, target_parameters=stacks)
        assert f"{trained} of {trained} trained" in check_moved(run_dir, EngineConfig(lora=lora))


def test_an_expert_without_tokens_may_stay_beside_one_that_moved(tmp_path: Path) -> None:
    names = tuple(f"model.layers.{layer}.mlp.experts.{n}.up_proj.weight" for layer in (0, 1) for n in (0, 1))
    some = run_of(tmp_path / "some", {names[0]: 1.0, names[3]: 1.0}, names)
    assert check_moved(some, ALL).endswith("2 of 4 trained tensors differ from the start; 2 experts got no token")
    none = run_of(tmp_path / "none", {names[0]: 1.0, names[1]: 1.0}, names)
    with pytest.raises(IdleRunError, match=r"did not reach: model.layers.1.mlp.experts.0.up_proj.weight, "):
        check_moved(none, ALL)


def test_an_export_in_another_dtype_is_compared_in_that(tmp_path: Path) -> None:
    run_dir = run_of(tmp_path, dict.fromkeys(NAMES, 1e-6))
    write(run_dir, "bfloat16", {name: torch.ones(3, dtype=torch.bfloat16) for name in NAMES})
    (run_dir / "bfloat16" / "model.safetensors").replace(run_dir / "export" / "model.safetensors")
    with pytest.raises(IdleRunError, match="0 of 3 trained"):
        check_moved(run_dir, ALL)
