"""Qwen3-235B, shrunk, through device npu, fully asynchronous: twelve ranks beside a process that samples (by hand).

Two or three ranks of each parallelism. By the stand-in that computes on the CPU; a minute and a half of processor time.
"""

from pathlib import Path

import pytest

from apps.grpo.testing.shrink import check, run_whole
from engines.fake_npu.build import reason_against

pytestmark = pytest.mark.skipif(reason_against() is not None, reason=str(reason_against()))
NAME = "qwen3-235b-a22b-async-npu"


def test_the_training_side_runs_through_device_npu_beside_a_process_that_samples(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """TP2, three stages with ends of their own, EP2, expert TP2, the distributed optimizer, the KL penalty."""
    argv = ["--recipe", NAME, "--shrink=12", "--run-dir", str(tmp_path / "run"), "--nproc-per-node", "128"]
    output, rows = run_whole([*argv, "--no-vllm"], tmp_path, capfd)
    assert "--nproc-per-node  128 -> 12" in output
    assert [row["weights/version"] for row in rows] == [1, 2]
    check(NAME, "bfloat16", output, rows, tmp_path / "run")
