"""Runs that refill groups without signal, killed at other moments than in refill_test, and gone on with."""

from pathlib import Path

import pytest

from apps.grpo.tests.refill_test import LONG, assert_trained_once, whole  # noqa: F401


@pytest.mark.parametrize("kill", LONG)
def test_a_killed_run_trains_each_task_with_signal_once(
    kill: str,
    whole: dict[str, Path],  # noqa: F811
    tmp_path: Path,
) -> None:
    assert_trained_once(kill, whole, tmp_path)
