"""Fully asynchronous runs whose weights move every other step, or that train several batches a step: killed inside a
window, ended inside one, and gone on with. Nothing is lost, and the numbers of weights count on.
"""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import apps.grpo.step as step
from apps.common.testing.process_kills import kill_at_call, run_in_child
from apps.grpo.testing.schedules import ASYNC, assert_nothing_lost, go, rows, small
from schedules.config import ScheduleConfig
from schedules.fully_async.async_state import staleness_settings

WINDOW = replace(ASYNC, parameter_sync_step=2)


def handed(run_dir: Path) -> dict[int, float]:
    """By step: the number of the weights that were handed over after it, those of repeated steps left out."""
    return {row["step"]: row["weights/version"] for row in rows(run_dir) if "weights/version" in row}


def assert_within_the_bound(run_dir: Path, schedule: ScheduleConfig, **changes: Any) -> None:
    """No task lost or trained twice, none of a group too old, and no token newer than what was handed over before."""
    config = small(run_dir, schedule, **changes)
    assert_nothing_lost(run_dir, config)
    settings = staleness_settings(schedule, config.prompts_per_step, config.steps)
    for row in rows(run_dir)[1:]:
        assert row["schedule/staleness"] <= settings.bound
        assert row["rollout/policy_version"] <= (row["step"] - 1) // settings.parameter_sync_step


def test_a_run_killed_inside_a_window_goes_on(tmp_path: Path) -> None:
    """Its third step is recorded, and repeated; the weights that follow it are the window's, after the fourth."""
    run_dir = tmp_path / "run"
    kill = lambda: kill_at_call(step, "train_on", 3, "after")  # noqa: E731
    assert run_in_child(go, run_dir, WINDOW, prepare=kill, save_every=2, eval_every=4) == -signal.SIGKILL
    assert run_in_child(go, run_dir, WINDOW, save_every=2, eval_every=4) == 0
    assert_within_the_bound(run_dir, WINDOW, save_every=2, eval_every=4)
    assert handed(run_dir)[4] == 2


def test_a_run_that_ended_inside_a_window_goes_on(tmp_path: Path) -> None:
    """Its last step's weights were handed over early, as number 2; with more steps the window's end has that number."""
    run_dir = tmp_path / "run"
    assert run_in_child(go, run_dir, WINDOW, steps=3, save_every=2, eval_every=2) == 0
    assert run_in_child(go, run_dir, WINDOW, steps=6, save_every=2, eval_every=2) == 0
    assert_within_the_bound(run_dir, WINDOW, steps=6, save_every=2, eval_every=2)
    assert handed(run_dir) == {2: 1, 3: 2, 4: 2, 6: 3}


SCHEDULES = {
    "two batches a step": replace(ASYNC, required_batches=2),
    "weights wait until nothing runs": ScheduleConfig("fully_async", 0.5, parameter_sync_step=2, partial_rollout=False),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_other_settings_killed_and_gone_on_with(schedule: ScheduleConfig, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    kill = lambda: kill_at_call(step, "train_on", 3, "after")  # noqa: E731
    assert run_in_child(go, run_dir, schedule, prepare=kill, save_every=2, eval_every=4) == -signal.SIGKILL
    assert run_in_child(go, run_dir, schedule, save_every=2, eval_every=4) == 0
    assert_within_the_bound(run_dir, schedule, save_every=2, eval_every=4)
    interrupted = [row["schedule/interrupted_answers"] for row in rows(run_dir)[1:]]
    assert schedule.partial_rollout or not any(interrupted)
