"""Whole runs of both apps on device npu, by the stand-in that computes on the CPU (docs/ascend.md).

Steps, checkpoints, evaluation, export, and the native sampler of GRPO, with training offloaded meanwhile: each figure
and each weight is the CPU's.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.compiler import set_stance
from torch.nn.attention import SDPBackend, sdpa_kernel

from apps.common.cluster import Cluster
from apps.grpo.main import run
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from apps.sft.main import run as supervised
from apps.sft.recipes import quickstart
from engines import EngineConfig
from engines.fake_npu.build import reason_against
from engines.fake_npu.path import fake_npu_on_path
from engines.fsdp2 import fsdp2_executor, prepared_model
from engines.megatron.runtime.process_groups import release
from engines.proofs.forked_ranks import launch_forked
from rollout.native.lean import rotary, slots
from seqpack.ops import gated_delta_rule_step

pytestmark = pytest.mark.skipif(reason_against() is not None, reason=str(reason_against()))
RUNS: dict[str, tuple[Any, Any]] = {"grpo": (run, RECIPE), "sft": (supervised, quickstart.RECIPE)}
SHORT: dict[str, Any] = {"steps": 2, "save_every": 2, "eval_every": 2}
TENSOR_PARALLEL = {"backend": "megatron", "tensor_parallel": 2}
CASES: dict[int, list[tuple[str, dict[str, Any]]]] = {
    1: [("grpo", {})],
    2: [("grpo", {}), ("sft", {}), ("grpo", TENSOR_PARALLEL), ("sft", TENSOR_PARALLEL)],
}


def whole_runs(device: Literal["cpu", "npu"], folder: Path) -> None:
    for number, (app, options) in enumerate(CASES[dist.get_world_size()]):
        whole_run(app, device, folder / str(number) / device, options)
        release()


def step_of_every_device(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, state: torch.Tensor
) -> torch.Tensor:
    return gated_delta_rule_step(q, k, v, g, beta, state, inplace=True)[0]


def whole_run(app: str, device: Literal["cpu", "npu"], run_dir: Path, options: dict[str, Any]) -> None:
    """What torchrun's ranks run; by the same attention and norms everywhere, as the CPU has some that no device has."""
    world = str(dist.get_world_size())
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # nobody connects: the group is there
    function, recipe = RUNS[app]
    config = recipe.config
    data = {"demonstrations": 64} if app == "sft" else {"eval_prompts": 8}
    engine = EngineConfig(device=device, dtype="float32", lr=3e-3, **options)
    if device == "npu":  # with its own operators it is near to the CPU, not equal
        engine = replace(engine, npu_operators="off")
    config = replace(config, run_dir=run_dir, engine=engine, data=replace(config.data, **data), **SHORT)
    if device == "npu" and app == "grpo":  # the CPU's runs do without, and end with the same bits
        config = replace(config, cluster=Cluster(offload=True))
    # Nothing is compiled on either device: the compiler's code for a CPU rounds differently.
    with sdpa_kernel(SDPBackend.MATH), set_stance("force_eager"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared_model, "use_host_norms", lambda model: None)
        patch.setattr(fsdp2_executor, "shares_prefixes", lambda model: False)  # a CPU alone does so
        patch.setattr(slots, "recur_newest", step_of_every_device)
        patch.setattr(rotary, "has_pairs", lambda like, head_dim: False)
        patch.setattr(slots, "LEAST_SPAN", 1)
        function(replace(config, nproc_per_node=int(world), **({"batch_size": 8} if app == "sft" else {})), recipe)


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]


def figures(run_dir: Path) -> list[dict[str, Any]]:
    """What every step told, but for times, memory, and bytes handed over: a CPU's sampler may share its trainer's."""
    passed = ("weights/bytes", "weights/pause_ms", "weights/staging_ms", "weights/link_share")
    timed = ("time", "seconds", "memory", "per_second", *passed)
    rows = rows_of(run_dir)
    return [{name: value for name, value in row.items() if not any(part in name for part in timed)} for row in rows]


@pytest.mark.parametrize("ranks", CASES)
def test_runs_equal_the_cpus(ranks: int, tmp_path: Path) -> None:
    launch_forked(whole_runs, ("cpu", tmp_path), ranks)
    with fake_npu_on_path():
        launch_forked(whole_runs, ("npu", tmp_path), ranks, device="npu")
    for number, case in enumerate(CASES[ranks]):
        print(case)
        same(tmp_path / str(number))


def same(folder: Path) -> None:
    here, there = (figures(folder / device) for device in ("cpu", "npu"))
    for left, right in zip(here, there, strict=True):
        assert {name: (value, right.get(name)) for name, value in left.items() if right.get(name) != value} == {}
        assert right.keys() == left.keys()
    for row in rows_of(folder / "npu"):  # the CPU's have none
        assert 0 < row["memory/allocated_gib"] <= row["memory/peak_gib"] == 64 * row["memory/peak_share"]
    weights = [load_file(folder / device / "export" / "model.safetensors") for device in ("cpu", "npu")]
    assert [name for name, value in weights[0].items() if not torch.equal(value, weights[1][name])] == []
    before = load_file(folder / "npu" / "model" / "model.safetensors")
    assert max((value.float() - before[name].float()).abs().max() for name, value in weights[1].items()) > 1e-3
