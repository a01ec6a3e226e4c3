"""For tests: short runs of the quickstart that train a head for multi-token prediction."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from apps.common.cluster import Cluster, RolloutLayout
from apps.grpo.config import GrpoConfig, WarmStart
from apps.grpo.recipes import quickstart
from apps.quickstart.headed_model import save_headed_model
from engines import EngineConfig
from runlog import read_metrics


def small(folder: Path, sampler: str, **engine: Any) -> GrpoConfig:
    """Return the settings of a run of two steps, with its model in `folder`."""
    return replace(
        quickstart.RECIPE.config,
        model=save_headed_model(folder / "model"),
        run_dir=folder / "run",
        steps=2,
        prompts_per_step=8,
        warm_start=WarmStart(steps=0),
        engine=EngineConfig(device="cpu", lr=8e-4, mtp_loss_scaling_factor=0.3, **engine),
        cluster=Cluster(rollout=RolloutLayout(engine=sampler)),
        eval_every=100,
        save_every=100,
    )


def assert_head_trained(folder: Path) -> None:
    """Assert that a finished run's metrics tell of the head, and that its export has another one."""
    steps = [row for row in read_metrics(folder / "run") if "train/mtp_loss" in row]
    assert len(steps) == 2
    assert steps[1]["train/mtp_loss"] < steps[0]["train/mtp_loss"]
    assert all(0 <= row["train/mtp_accuracy"] <= 1 for row in steps)
    before, after = (_head_of(folder / name) for name in ("model", "run/export"))
    assert before.keys() == after.keys()
    assert len(after) == 15
    assert not any(after[name].equal(tensor) for name, tensor in before.items())


def _head_of(directory: Path) -> dict[str, Any]:
    tensors = load_file(directory / "model.safetensors")
    return {name: tensor for name, tensor in tensors.items() if name.startswith("mtp.")}
