"""The NPU recipes as they stand, shrunk: training through device npu by the stand-in, vLLM beside it on the CPU."""

import os

import pytest

from apps.grpo.registry import recipes
from apps.grpo.shrink_testing import check, run_whole
from engines.testing.npu.build import reason_against

REASON = reason_against() or "TESSERA_VLLM_PYTHON names no interpreter with vLLM"
pytestmark = pytest.mark.skipif("TESSERA_VLLM_PYTHON" not in os.environ or reason_against() is not None, reason=REASON)


@pytest.mark.parametrize("name", ["qwen3-5-27b-fsdp2-npu", "qwen3-5-35b-a3b-fsdp2-npu"])
def test_a_recipe_runs_through_device_npu_with_its_own_sampler(name, tmp_path, capfd, monkeypatch):
    """Two ranks of FSDP2 that train a tower, without and with experts; two of vLLM's workers that see by it."""
    for entry in recipes()[name].config.cluster.environment:  # as the command starts itself again with them
        monkeypatch.setenv(*entry.split("="))
    told, rows = run_whole(["--recipe", name, "--shrink=2", "--run-dir", str(tmp_path / "run")], tmp_path, capfd)
    assert {line.split()[1] for line in told.splitlines() if line.startswith("flag")} == {"--reward", "--steps"}
    assert "device --cluster.rollout.device  auto -> cpu" in told
    assert [row["weights/version"] for row in rows] == [1, 2]
    assert [row["rollout/failed_episodes"] for row in rows] == [0, 0]
    assert max(row["weights/probe/abs"] for row in rows) < 0.05
    check(name, "bfloat16", told, rows, tmp_path / "run")
