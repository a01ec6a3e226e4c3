"""Qwen3-235B, shrunk, as it stands: device npu trains, and vLLM samples on a node of its own in a Ray cluster.

`--shrink` starts the cluster's two nodes on this machine; the NPU is the stand-in that computes on the CPU. By hand,
ten minutes on two cores: `./bazelw test --config=vllm //apps/grpo:tests/shrink_npu_pools_test`.
"""

import os
from pathlib import Path

import pytest

from apps.grpo.testing.schedules import proofs
from apps.grpo.testing.shrink import check, run_whole
from engines.fake_npu.build import reason_against

REASON = f"needs vLLM (TESSERA_VLLM_PYTHON) and the stand-in for an NPU: {reason_against()}"
pytestmark = pytest.mark.skipif("TESSERA_VLLM_PYTHON" not in os.environ or reason_against() is not None, reason=REASON)
NAME = "qwen3-235b-a22b-async-npu"


def test_the_recipe_runs_as_it_stands(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Fully asynchronous: twelve ranks of TP2, PP3, EP2, expert TP2; two samplers in Ray, each two copies in vLLM of
    two workers, which share the experts. No flag leaves anything out."""
    output, rows = run_whole(["--recipe", NAME, "--shrink", "--run-dir", str(tmp_path / "run")], tmp_path, capfd)
    assert {line.split()[1] for line in output.splitlines() if line.startswith("flag")} == {"--max-steps"}
    for change in ("processes  16 -> 12", "cluster.pools.rollout-nodes  8 -> 1", "cluster.rollout.ep  64 -> 4"):
        assert f"--{change}" in output
    assert "--rollout.ray-workers" not in output
    assert "Ray: 1 + 1 nodes, all of this machine, at 127.0.0.1:" in output
    assert "RAY_ADDRESS" not in os.environ
    assert [row["weights/version"] for row in rows] == [1, 2]
    assert max(proofs(rows)) < 0.05
    check(NAME, "bfloat16", output, rows, tmp_path / "run")


def test_samplers_in_ray_that_would_sample_on_an_npu_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ["--recipe", NAME, "--shrink", "--run-dir", str(tmp_path / "run"), "--no-vllm"]
    argv += ["--nproc-per-node", "128", "--rollout.ray-workers", "1"]
    with pytest.raises(AssertionError, match=r"ray-workers on npu: no test has run .*set --trainer.device cpu, or"):
        run_whole(argv, tmp_path, capfd)
