"""A run on two ranks loses the second one at a named point, each in a run of its own and one after the other in one
run: nothing is skipped and nothing trained twice. By hand, as it takes some twenty minutes:
`bazel test //apps/grpo:tests/ranks_points_test`.
"""

from pathlib import Path
from typing import Any

import pytest

from apps.grpo.testing.kill_points import RANK_POINTS, ended_at, kill_at_points
from apps.grpo.testing.ranks import digests, go_on_ranks
from apps.grpo.testing.schedules import ASYNC, ONE, SYNC, assert_nothing_lost, nothing, same_weights, small
from engines.launch import RankError
from schedules.config import ScheduleConfig

SCHEDULES: dict[str, ScheduleConfig] = {schedule.mode: schedule for schedule in (SYNC, ONE, ASYNC)}
CASES = [(mode, point) for mode, points in RANK_POINTS.items() for point in points]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that nobody killed, in the schedules whose runs end with the same bits."""
    found = {mode: tmp_path_factory.mktemp(mode) / "run" for mode in ("sync", "one_step_off")}
    for mode, run_dir in found.items():
        go_on_ranks(run_dir, schedule=SCHEDULES[mode])
    return found


@pytest.mark.parametrize(("mode", "point"), CASES)
def test_a_killed_rank_loses_nothing(tmp_path: Path, whole: dict[str, Path], mode: str, point: str) -> None:
    """All ranks end; gone on with, both have the same weights, and those of a run that nobody killed."""
    run_dir, schedule = tmp_path / "run", SCHEDULES[mode]
    with pytest.raises(RankError, match="rank 1 died with exit code -9"):
        go_on_ranks(run_dir, nothing, kill_at_points(run_dir, RANK_POINTS[mode], point), schedule=schedule)
    assert ended_at(run_dir, point) == [point]
    go_on_ranks(run_dir, schedule=schedule)
    assert_nothing_lost(run_dir, small(run_dir, schedule))
    assert len(set(digests(run_dir))) == 1
    if mode in whole:
        assert same_weights(whole[mode], run_dir)


@pytest.mark.parametrize("schedule", [SYNC, ONE, ASYNC], ids=lambda schedule: schedule.mode)
def test_a_training_rank_killed_at_all_points_loses_nothing(tmp_path: Path, schedule: ScheduleConfig) -> None:
    """One after the other: the run is gone on with from its last checkpoint, and its second rank ends at the next
    point. Where a run ends with the same bits, it does with those of one that nobody killed.
    """
    points = RANK_POINTS[schedule.mode]
    run_dir = tmp_path / "run"
    changes: dict[str, Any] = {"schedule": schedule, "steps": 28, "eval_every": 2}
    for number in range(len(points)):
        assert len(ended_at(run_dir, *points)) == number
        with pytest.raises(RankError, match="rank 1 died with exit code -9"):
            go_on_ranks(run_dir, nothing, kill_at_points(run_dir, points, *points), **changes)
    go_on_ranks(run_dir, nothing, kill_at_points(run_dir, points, *points), **changes)
    assert_nothing_lost(run_dir, small(run_dir, **changes))
    assert len(set(digests(run_dir))) == 1
    if schedule is not ASYNC:
        go_on_ranks(tmp_path / "whole", **changes)
        assert same_weights(tmp_path / "whole", run_dir)
