"""A run that is killed at each named point of each role: nothing is skipped and nothing trained twice.

Fully asynchronous: the driver, and the process that samples; in the other schedules the driver is killed in `kill_test`
and `schedule_deaths_test`. By hand: the second of two training ranks is `ranks_points_test`'s, random moments are
`schedule_kills_test`'s, Ray's actors `ray_points_test`'s.
"""

import signal
from pathlib import Path

import pytest

from apps.common.testing.process_kills import run_in_child
from apps.grpo.testing.kill_points import DRIVER, WORKER, ended_at, kill_at_points
from apps.grpo.testing.schedules import ASYNC, assert_nothing_lost, go, small


@pytest.mark.parametrize("point", DRIVER)
def test_a_killed_driver_loses_nothing(tmp_path: Path, point: str) -> None:
    """The driver trains too; its sampling process ends with it, and the run is gone on with."""
    run_dir = tmp_path / "run"
    assert run_in_child(go, run_dir, ASYNC, kill_at_points(run_dir, DRIVER, point)) == -signal.SIGKILL
    assert run_in_child(go, run_dir, ASYNC) == 0
    assert_nothing_lost(run_dir, small(run_dir, ASYNC))


@pytest.mark.parametrize("point", WORKER)
def test_a_killed_rollout_worker_loses_nothing(tmp_path: Path, point: str) -> None:
    """Another one takes over; the first of all, where it can't even begin, ends the run, which is gone on with."""
    run_dir = tmp_path / "run"
    code = run_in_child(go, run_dir, ASYNC, sampler=kill_at_points(run_dir, WORKER, point))
    assert ended_at(run_dir, point) == [point]
    if point == "while it begins":
        assert code == 1
        code = run_in_child(go, run_dir, ASYNC)
    assert code == 0
    assert_nothing_lost(run_dir, small(run_dir, ASYNC))
