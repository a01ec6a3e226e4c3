"""A run that is killed at each named point of each role: nothing is skipped and nothing trained twice.

Fully asynchronous, the roles are the driver, the process that samples, and the second of two training ranks; in the
other schedules that rank, which samples too, is killed here, and the driver in `kill_test` and `schedule_deaths_test`.
Random moments are `schedule_kills_test`'s, which is run by hand; Ray's actors are `ray_points_test`'s, as well.
"""

import signal
from pathlib import Path
from typing import Any

import pytest

from apps.common.kills import in_child
from apps.common.plan.cluster import Schedule
from apps.grpo.kill_points_testing import DRIVER, RANK_POINTS, WORKER, killed_at, killing
from apps.grpo.schedule_ranks_testing import digests, go_on_ranks
from apps.grpo.schedule_testing import ASYNC, ONE, assert_nothing_lost, go, nothing, same_weights, small
from engines.launch import RankError


@pytest.mark.parametrize("point", DRIVER)
def test_a_killed_driver_loses_nothing(tmp_path: Path, point: str) -> None:
    """The driver trains too; its sampling process ends with it, and the run is gone on with."""
    run_dir = tmp_path / "run"
    assert in_child(go, run_dir, ASYNC, killing(run_dir, DRIVER, point)) == -signal.SIGKILL
    assert in_child(go, run_dir, ASYNC) == 0
    assert_nothing_lost(run_dir, small(run_dir, ASYNC))


@pytest.mark.parametrize("point", WORKER)
def test_a_killed_rollout_worker_loses_nothing(tmp_path: Path, point: str) -> None:
    """Another one takes over; the first of all, where it can't even begin, ends the run, which is gone on with."""
    run_dir = tmp_path / "run"
    code = in_child(go, run_dir, ASYNC, sampler=killing(run_dir, WORKER, point))
    assert killed_at(run_dir, point) == [point]
    if point == "while it begins":
        assert code == 1
        code = in_child(go, run_dir, ASYNC)
    assert code == 0
    assert_nothing_lost(run_dir, small(run_dir, ASYNC))


@pytest.mark.parametrize("schedule", [Schedule("sync"), ONE, ASYNC], ids=lambda schedule: schedule.mode)
def test_a_training_rank_killed_at_all_points_loses_nothing(tmp_path: Path, schedule: Schedule) -> None:
    """One after the other: the run is gone on with from its last checkpoint, and its second rank ends at the next
    point. Where a run ends with the same bits, it does with those of one that nobody killed.
    """
    points = RANK_POINTS[schedule.mode]
    run_dir = tmp_path / "run"
    changes: dict[str, Any] = {"schedule": schedule, "steps": 28, "eval_every": 2}
    for number in range(len(points)):
        assert len(killed_at(run_dir, *points)) == number
        with pytest.raises(RankError, match="rank 1 died with exit code -9"):
            go_on_ranks(run_dir, nothing, killing(run_dir, points, *points), **changes)
    go_on_ranks(run_dir, nothing, killing(run_dir, points, *points), **changes)
    assert_nothing_lost(run_dir, small(run_dir, **changes))
    assert len(set(digests(run_dir))) == 1
    if schedule is not ASYNC:
        go_on_ranks(tmp_path / "whole", **changes)
        assert same_weights(tmp_path / "whole", run_dir)
