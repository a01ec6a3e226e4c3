"""A run on two ranks, one step off, that does not learn: both stop at the same step."""

from pathlib import Path

from apps.grpo.testing.schedules import ONE
from apps.grpo.tests.idle_ranks_test import assert_stops_and_goes_on


def test_both_ranks_stop_at_the_same_step_and_go_on(tmp_path: Path) -> None:
    assert_stops_and_goes_on(ONE, tmp_path)
