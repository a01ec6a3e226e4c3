"""A run of each schedule that is stopped, ended, killed, misled about the time, out of disk and robbed of files.

No task is lost. One random moment of each kind, by a seed; ten of each by hand (`signals_by_hand_test`).
"""

from pathlib import Path

import pytest

from apps.grpo.testing.schedules import ASYNC, ONE, SYNC
from apps.grpo.testing.signals import KINDS, play
from schedules.config import ScheduleConfig


@pytest.mark.parametrize("schedule", [SYNC, ONE, ASYNC], ids=lambda schedule: schedule.mode)
def test_one_moment_of_each_kind(tmp_path: Path, schedule: ScheduleConfig) -> None:
    assert sorted(play(tmp_path / "run", schedule, moments=1, seed=17)) == sorted(KINDS)
