"""A run on two ranks that does not learn: both stop at the same step, with a checkpoint (idle_ranks_one_test too)."""

from dataclasses import replace
from pathlib import Path

import pytest

from apps.common.run.checkpoints import last_checkpoint
from apps.grpo.main import run
from apps.grpo.testing.idle import idle_recipe
from apps.grpo.testing.schedules import ASYNC, SYNC, rows, small
from engines.launch import RankError
from schedules.config import ScheduleConfig


def assert_stops_and_goes_on(schedule: ScheduleConfig, tmp_path: Path) -> None:
    config = small(tmp_path / "run", schedule, nproc_per_node=2, allow_idle_steps=2)
    with pytest.raises(
        RankError, match=r"step 3: 2 steps in a row trained nothing, the last one as every reward was 0\.5"
    ):
        run(config, idle_recipe("same", range(2, 5)))
    assert (last_checkpoint(tmp_path / "run") or (0, None))[0] == 3
    run(replace(config, allow_idle_steps=None, resume=True), idle_recipe("same", range(2, 5)))
    assert [row["train/idle_steps"] for row in rows(tmp_path / "run")[1:]] == [0, 1, 2, 3]


@pytest.mark.parametrize("schedule", [SYNC, ASYNC], ids=lambda schedule: schedule.mode)
def test_both_ranks_stop_at_the_same_step_and_go_on(schedule: ScheduleConfig, tmp_path: Path) -> None:
    assert_stops_and_goes_on(schedule, tmp_path)
