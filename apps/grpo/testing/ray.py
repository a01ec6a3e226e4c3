"""Helpers of tests whose samplers are actors of a real Ray cluster on this machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

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
