"""Helpers of tests whose samplers are actors of a real Ray cluster on this machine."""

import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray

from apps.common.cluster import Pools, RolloutLayout
from apps.grpo.config import GrpoConfig
from apps.grpo.main import run
from apps.grpo.testing.schedules import (
    ASYNC,
    ONE,
    SYNC,
    Prepare,
    note_start,
    nothing,
    sampled_recipe,
    small,
    watched,
    without_recording,
)
from rollout.sync.pieces import Bucket
from rollout.workers.ray_pool import RayPool
from schedules.config import ScheduleConfig

SCHEDULES = pytest.mark.parametrize("schedule", [SYNC, ONE, ASYNC], ids=lambda schedule: schedule.mode)
TWO = RolloutLayout(ray_workers=2)


def in_ray(run_dir: Path, schedule: ScheduleConfig, layout: RolloutLayout = TWO, **changes: Any) -> GrpoConfig:
    """Return the configuration of a run of four steps, sampled by the actors of `layout`."""
    config = small(run_dir, schedule, **changes)
    return replace(config, cluster=replace(config.cluster, rollout=layout))


def apart(run_dir: Path, schedule: ScheduleConfig, nodes: int, workers: int, **changes: Any) -> GrpoConfig:
    """Return the same with `workers` actors on `nodes` nodes, none of which trains."""
    config = in_ray(run_dir, schedule, RolloutLayout(ray_workers=workers), **changes)
    return replace(config, cluster=replace(config.cluster, pools=Pools(placement="separate", rollout_nodes=nodes)))


def go_in_ray(config: GrpoConfig, sampler: Prepare = nothing) -> None:
    """Run from the start, or resume the run of the folder, with its steps recorded; `sampler` prepares its actors."""
    assert config.run_dir is not None
    with without_recording():
        watched(config.run_dir)
        run(replace(config, resume=note_start(config.run_dir)), sampled_recipe(sampler))


def note_buckets(path: Path) -> None:
    """Make this process note the kind of each bucket that its pool gets."""
    real = RayPool.receive

    async def receive(self: RayPool, bucket: Bucket) -> int:
        with path.open("a") as file:
            file.write(f"{type(bucket).__name__}\n")
        return await real(self, bucket)

    RayPool.receive = receive  # type: ignore[method-assign]


def kill_sampler(name: str, which: int) -> None:
    """Make this process kill the sampler that its pools call for the time `which` by this name."""
    calls, real = 0, RayPool._ask

    def ask(self: RayPool, index: int, asked: str, arguments: Mapping[str, Any], data: Any = None) -> Any:
        nonlocal calls
        calls += asked == name
        if asked == name and calls == which:
            os.kill(ray.get(self._actors[index].process.remote()), signal.SIGKILL)
        return real(self, index, asked, arguments, data)

    RayPool._ask = ask  # type: ignore[method-assign, assignment]
