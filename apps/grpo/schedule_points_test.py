"""A fully asynchronous run that is killed at each named point of each role: nothing is skipped or trained twice.

The roles are the driver, the process that samples, and the second of two training ranks (`kill_points_testing`). Random
moments are `schedule_kills_test`'s, which is run by hand.
"""

import signal
from pathlib import Path

import pytest

from apps.common.kills import in_child
from apps.grpo.kill_points_testing import DRIVER, RANK, WORKER, killed_at, killing
from apps.grpo.schedule_ranks_testing import go_on_ranks, nothing, on_ranks, sound
from apps.grpo.schedule_testing import ASYNC, assert_nothing_lost, go, small
from engines.launch import RankError


@pytest.mark.parametrize("point", DRIVER)
def test_a_killed_driver_loses_nothing(tmp_path: Path, point: str) -> None:
    """The driver trains too; its sampling process ends with it, and the run is gone on with."""
    run_dir = tmp_path / "run"
    assert in_child(go, run_dir, ASYNC, killing(run_dir, "driver", point)) == -signal.SIGKILL
    assert in_child(go, run_dir, ASYNC) == 0
    assert_nothing_lost(run_dir, small(run_dir, ASYNC))


@pytest.mark.parametrize("point", WORKER)
def test_a_killed_rollout_worker_loses_nothing(tmp_path: Path, point: str) -> None:
    """Another one takes over; the first of all, where it can't even begin, ends the run, which is gone on with."""
    run_dir = tmp_path / "run"
    code = in_child(go, run_dir, ASYNC, sampler=killing(run_dir, "rollout worker", point))
    assert killed_at(run_dir, "rollout worker", point) == [point]
    if point == "while it begins":
        assert code == 1
        code = in_child(go, run_dir, ASYNC)
    assert code == 0
    assert_nothing_lost(run_dir, small(run_dir, ASYNC))


@pytest.mark.parametrize("point", RANK)
def test_a_killed_training_rank_loses_nothing(tmp_path: Path, point: str) -> None:
    """All ranks end; both end with the same weights when the run is gone on with."""
    run_dir = tmp_path / "run"
    with pytest.raises(RankError, match="rank 1 died with exit code -9"):
        go_on_ranks(run_dir, nothing, killing(run_dir, "training rank", point))
    assert killed_at(run_dir, "training rank", point) == [point]
    go_on_ranks(run_dir)
    sound(run_dir, on_ranks(run_dir))
