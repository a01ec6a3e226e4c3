"""`signals_test` with ten random moments of each kind. By hand, as it takes many minutes."""

from pathlib import Path

import pytest

from apps.grpo.testing.schedules import ASYNC, ONE, SYNC
from apps.grpo.testing.signals import KINDS, play
from schedules.config import ScheduleConfig


@pytest.mark.parametrize("schedule", [SYNC, ONE, ASYNC], ids=lambda schedule: schedule.mode)
def test_ten_moments_of_each_kind(tmp_path: Path, schedule: ScheduleConfig) -> None:
    assert sorted(play(tmp_path / "run", schedule, moments=10, seed=19)) == sorted(KINDS * 10)
