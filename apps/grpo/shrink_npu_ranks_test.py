"""Qwen3-235B's side that trains, shrunk, through device npu: twelve ranks, two or three of each parallelism (by hand).

By the stand-in that computes on the CPU; a minute and a half of processor time.
"""

import pytest

from apps.grpo.shrink_testing import NATIVE, ONE_POOL, check, run_whole
from engines.testing.npu.build import reason_against

pytestmark = pytest.mark.skipif(reason_against() is not None, reason=str(reason_against()))
NAME = "qwen3-235b-a22b-async-npu"
ONE_STEP_OFF = (
    *("--cluster.schedule.mode", "one_step_off", "--cluster.schedule.staleness-threshold", "0"),
    "--cluster.schedule.no-partial-rollout",
)
"""Several ranks are refused in a fully asynchronous run."""


def test_the_training_side_runs_through_device_npu(tmp_path, capfd):
    """TP2, three stages with ends of their own, EP2, expert TP2, the distributed optimizer, the KL penalty."""
    argv = ["--recipe", NAME, "--shrink=12", "--run-dir", str(tmp_path / "run"), "--processes", "128"]
    told, rows = run_whole([*argv, *NATIVE, *ONE_POOL, *ONE_STEP_OFF], tmp_path, capfd)
    assert "--processes  128 -> 12" in told
    check(NAME, "bfloat16", told, rows, tmp_path / "run")
