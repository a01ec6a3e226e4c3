"""A run's memory table is the plan's: the same rows with the same bytes, and nothing large that nobody registered."""

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import apps.grpo.train as training
from apps.common.run.device_memory import memory_metrics, memory_rows
from apps.grpo.config import GrpoConfig, WarmStart
from apps.grpo.main import run
from apps.grpo.registry import spec_of
from apps.grpo.testing.recipe import RECIPE
from apps.grpo.testing.schedules import ASYNC, ONE, SYNC, rows, small
from engines import LoraConfig
from engines.loading import read_config
from objectives import GRPO
from runplan.estimates.buffers import Buffer
from runplan.model.model_shape import shape_of
from runplan.report.memory_lines import states_of
from runplan.report.memory_table import memory_table
from schedules.config import ScheduleConfig
from seqpack.memory import ledger

EXACT = (
    *(ledger.WEIGHTS, ledger.GRADIENTS, ledger.OPTIMIZER, ledger.REFERENCE, ledger.CHECKPOINT),
    ledger.SAMPLER_STAGED,
)
TOLERANCE = 0.05
"""Of these rows: buffers, adapters' pairs, and shards of unequal size. The others are bounds."""


def planned(config: GrpoConfig, run_dir: Path) -> dict[str, Buffer]:
    """Return the plan's rows: the model's checkpoint is in float32."""
    spec, shape = spec_of(config, RECIPE), shape_of(read_config(run_dir / "model"), "tiny")
    states = states_of(spec, shape, spec.grid, [shape.layers], disk=4)
    return {row.name: row for row in memory_table(spec, shape, states, disk=4)}


def compared(config: GrpoConfig, metrics: dict[str, Any]) -> list[str]:
    """Return what differs between the plan's table and the run's."""
    assert config.run_dir is not None
    plan = planned(config, config.run_dir)
    found = {row.name: row.device + row.host for row in memory_rows(metrics)}
    problems = [f"{name} is in one table alone" for name in plan.keys() ^ found.keys()]
    for name in plan.keys() & found.keys():
        bound = plan[name].device + plan[name].host
        low = (1 - TOLERANCE) * bound if name in EXACT else 1
        if not low <= found[name] <= (1 + TOLERANCE) * bound:
            problems.append(f"{name}: {bound:.0f} planned, {found[name]:.0f} in the run")
    return problems


def changed(schedule: ScheduleConfig, **changes: Any) -> Callable[[Path], GrpoConfig]:
    def make(run_dir: Path) -> GrpoConfig:
        engine = replace(RECIPE.config.engine, **changes.pop("engine", {}))
        return small(run_dir, schedule, **{"steps": 3, "save_every": 1, "engine": engine, **changes})

    return make


RUNS = {
    "sync with KL": changed(SYNC, objective=GRPO(kl_coef=0.1)),
    "after a warm start": changed(SYNC, warm_start=WarmStart(steps=2, eval_every=2, eval_prompts=4, batch_size=4)),
    "LoRA": changed(SYNC, engine={"lora": LoraConfig(rank=4)}, objective=GRPO(kl_coef=0.1)),
    "one step off": changed(ONE),
    "fully async": changed(ASYNC),
    "sharded": changed(SYNC, engine={"weights": "sharded"}, objective=GRPO(kl_coef=0.1)),
    "bfloat16": changed(SYNC, engine={"dtype": "bfloat16"}, objective=GRPO(kl_coef=0.1)),
    "two processes": changed(SYNC, nproc_per_node=2, objective=GRPO(kl_coef=0.1)),
    "two replicas": changed(SYNC, nproc_per_node=2, engine={"weights": "replicated"}, objective=GRPO(kl_coef=0.1)),
}


LOOKED_AT = ("sync with KL", "one step off", "sharded", "LoRA", "bfloat16")


def unregistered() -> list[tuple[int, tuple[int, ...]]]:
    """Return bytes and shape of each tensor whose memory nobody registered, the largest first."""
    known, sizes = ledger.registered(), {}
    for one in gc.get_objects():
        if issubclass(type(one), torch.Tensor):
            for tensor in ledger.tensors_in(one):
                key = ledger.key_of(tensor)
                if key is not None and key not in known and tensor.layout == torch.strided:
                    sizes[key] = (tensor.untyped_storage().nbytes(), tuple(tensor.shape))
    return sorted(sizes.values(), reverse=True)


def lasting(most: float) -> list[tuple[int, tuple[int, ...]]]:
    """Return what nobody registered; where that is more than so many bytes, after two seconds in which it stays: a
    sampler that reads new weights beside this thread registers them once it has them."""
    for _ in range(20):
        left = unregistered()
        if sum(size for size, _ in left) < most:
            break
        time.sleep(0.1)
        gc.collect()
    return left


@pytest.mark.parametrize("name", RUNS)
def test_a_runs_table_is_the_plans_and_nothing_large_is_missing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two steps, of all tensors that Python knows in a run of one process."""
    seen: list[tuple[int, list[tuple[int, tuple[int, ...]]]]] = []

    def looked(device: str) -> dict[str, float]:
        gc.collect()
        found = memory_metrics(device)
        total = sum(row.device + row.host for row in ledger.rows() if row.name != ledger.SAMPLER_CACHES)
        seen.append((total, lasting(TOLERANCE * total)))
        return found

    gc.collect()
    config = RUNS[name](tmp_path / "run")
    monkeypatch.setattr(training, "memory_metrics", looked)
    run(config, RECIPE)
    assert compared(config, rows(tmp_path / "run")[-1]) == []
    assert name not in LOOKED_AT or len(seen) == 3
    for total, left in seen[1:] if name in LOOKED_AT else []:
        assert sum(size for size, _ in left) < TOLERANCE * total, left[:5]
