"""Ray's samplers on CUDA devices of their own, beside a trainer on the first: weights by NCCL, proven at each step.

Each run starts a Ray cluster of this machine, which hands out the devices that training leaves. With an interpreter
that has vLLM for them in TESSERA_VLLM_PYTHON, vLLM samples in the actor too.

    python -m pytest apps/grpo/tests/ray_gpu_test.py
"""

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from apps.common.cluster import RolloutLayout
from apps.grpo.config import GrpoConfig
from apps.grpo.main import run
from apps.grpo.testing.gpu import TRITON, gpu_served
from apps.grpo.testing.recipe import RECIPE
from apps.grpo.testing.schedules import ASYNC, SYNC, proofs, rows, small
from engines import EngineConfig
from rollout.workers.ray_pool import RayPool
from schedules.config import ScheduleConfig

DEVICES = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(DEVICES < 2, reason="needs 2 CUDA devices: the trainer's and a sampler's"),
]
VLLM = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)
BOUND = 0.05
"""Mean distance of log-probs in bfloat16, as `apps.grpo.sampling.vllm.BOUNDS` has it."""


def in_ray(run_dir: Path, schedule: ScheduleConfig, layout: RolloutLayout, **changes: Any) -> GrpoConfig:
    config = small(
        run_dir, schedule, **{"steps": 3, "save_every": 3, "eval_every": 3, "keep_checkpoints": 0, **changes}
    )
    engine = EngineConfig(device="cuda", lr=1e-3, compile="off")
    return replace(config, engine=engine, cluster=replace(config.cluster, rollout=layout))


def first_device() -> str:
    """The trainer's, by the name that CUDA_VISIBLE_DEVICES gives it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, list[str]]]:
    """Of each pool that a run closes alive: whether its weights were broadcast, and the devices of its samplers."""
    found, plain = [], RayPool.close

    def close(self: RayPool) -> None:
        if self.alive:
            grouped = self._broadcast is not None and self._broadcast.met
            found.append((grouped, ray.get([actor.devices.remote() for actor in self._actors], timeout=60)))
        plain(self)

    monkeypatch.setattr(RayPool, "close", close)
    return found


def assert_handed_over(run_dir: Path, steps: int = 3) -> None:
    """Each step's weights were, and each hand-over is proven."""
    logged = rows(run_dir)
    assert [row["step"] for row in logged] == list(range(steps + 1))
    assert [row["weights/version"] for row in logged[1:]] == list(range(1, steps + 1))
    told = proofs(logged[1:])
    assert all(0 <= proof < BOUND for proof in told)
    assert len(told) >= steps - 1  # fully_async tells of the last two together


@pytest.mark.parametrize(
    ("schedule", "workers"), [(SYNC, min(2, DEVICES - 1)), (ASYNC, 1)], ids=["sync", "fully_async"]
)
def test_samplers_on_devices_of_their_own_take_each_steps_weights(
    tmp_path: Path, pools: list[tuple[bool, list[str]]], schedule: ScheduleConfig, workers: int
) -> None:
    """Two of them in turn, where there are three devices."""
    run(in_ray(tmp_path, schedule, RolloutLayout(ray_workers=workers)), RECIPE)
    assert_handed_over(tmp_path)
    ((grouped, devices),) = pools
    assert grouped, "auto is NCCL where samplers have devices of their own on this machine"
    assert all(devices)
    assert len({*devices, first_device()}) == workers + 1


def test_a_sampler_that_is_killed_as_weights_come_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pools: list[tuple[bool, list[str]]]
) -> None:
    """The broadcast that it leaves is ended on the trainer's device, which trains on; the next one has a new group."""
    killed: list[int] = []
    plain = RayPool._ask

    def ask(self: RayPool, index: int, asked: str, arguments: Mapping[str, Any], data: Any = None) -> Any:
        if asked == "receive" and not killed:
            killed.append(ray.get(self._actors[index].process.remote()))
            os.kill(killed[0], signal.SIGSTOP)  # before the bucket: the sender is left with it
            found = plain(self, index, asked, arguments, data)
            os.kill(killed[0], signal.SIGKILL)
            return found
        return plain(self, index, asked, arguments, data)

    monkeypatch.setattr(RayPool, "_ask", ask)
    run(in_ray(tmp_path, SYNC, RolloutLayout(ray_workers=1), steps=2, save_every=2, eval_every=2), RECIPE)
    assert killed
    assert_handed_over(tmp_path, 2)
    assert [grouped for grouped, _ in pools] == [True]


@VLLM
@pytest.mark.parametrize("schedule", [SYNC, ASYNC], ids=lambda schedule: schedule.mode)
def test_vllm_in_an_actor_takes_each_steps_weights(
    tmp_path: Path, pools: list[tuple[bool, list[str]]], schedule: ScheduleConfig
) -> None:
    layout = RolloutLayout("vllm", ray_workers=1, memory_share=0.2, max_requests=32, vllm=TRITON)
    run(in_ray(tmp_path, schedule, layout, steps=2, save_every=2, eval_every=2), gpu_served())
    assert_handed_over(tmp_path, 2)
    ((grouped, devices),) = pools
    assert grouped
    assert first_device() not in devices


@pytest.mark.parametrize("schedule", [SYNC, ASYNC], ids=lambda schedule: schedule.mode)
def test_more_samplers_than_training_leaves_devices_are_refused_with_the_numbers(
    tmp_path: Path, schedule: ScheduleConfig
) -> None:
    told = rf"{DEVICES} of 1 CUDA devices each need {DEVICES}, and of {DEVICES} here 1 train and {DEVICES - 1} are left"
    with pytest.raises(ValueError, match=told):
        run(in_ray(tmp_path, schedule, RolloutLayout(ray_workers=DEVICES)), RECIPE)
    assert not (tmp_path / "metrics.jsonl").exists()
