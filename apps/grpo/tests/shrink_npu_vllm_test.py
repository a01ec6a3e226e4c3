"""The NPU recipes as they stand, shrunk: training through device npu by the stand-in, vLLM beside it on the CPU."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from apps.grpo.registry import recipes
from apps.grpo.testing.schedules import proofs
from apps.grpo.testing.shrink import ONE_RANK, check, run_whole
from engines.fake_npu.build import reason_against

REASON = reason_against() or "TESSERA_VLLM_PYTHON names no interpreter with vLLM"
pytestmark = pytest.mark.skipif("TESSERA_VLLM_PYTHON" not in os.environ or reason_against() is not None, reason=REASON)


ASYNC = "qwen3-235b-a22b-async-npu"
ON_ONE_MACHINE = (
    *("--pools.nodes", "1", "--pools.placement", "colocated", "--pools.rollout-nodes", "0"),
    *("--rollout.ray-workers", "0"),
)
"""Without machines of their own that sample, which shrink_npu_pools_test has."""


@pytest.mark.parametrize("name", ["qwen3-5-27b-fsdp2-npu", "qwen3-5-35b-a3b-fsdp2-npu"])
def test_a_recipe_runs_through_device_npu_with_its_own_sampler(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of FSDP2 that train a tower, without and with experts; two of vLLM's workers that see by it."""
    for entry in recipes()[name].config.cluster.env:  # as the command starts itself again with them
        monkeypatch.setenv(*entry.split("="))
    output, rows = run_whole(["--recipe", name, "--shrink=2", "--run-dir", str(tmp_path / "run")], tmp_path, capfd)
    assert {line.split()[1] for line in output.splitlines() if line.startswith("flag")} == {"--max-steps"}
    assert "device --rollout.device  auto -> cpu" in output
    assert [row["weights/version"] for row in rows] == [1, 2]
    assert [row["rollout/failed_episodes"] for row in rows] == [0, 0]
    assert max(row["weights/check/abs"] for row in rows) < 0.05
    check(name, "bfloat16", output, rows, tmp_path / "run")


def test_both_sides_of_the_asynchronous_recipe_run_beside_each_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One Megatron rank on device npu; two copies in vLLM of two workers each; experts are dealt to all four."""
    argv = ["--recipe", ASYNC, "--shrink=1", "--run-dir", str(tmp_path / "run"), *ON_ONE_MACHINE, *ONE_RANK]
    output, rows = run_whole(argv, tmp_path, capfd)
    sizes = ("tensor-parallel  8 -> 2", "data-parallel  8 -> 2", "expert-parallel  64 -> 4")
    for change in (*sizes, "device  auto -> cpu"):
        assert f"--rollout.{change}" in output
    assert max(proofs(rows)) < 0.05
    check(ASYNC, "bfloat16", output, rows, tmp_path / "run")
    episodes = [json.loads(line) for line in (tmp_path / "run" / "episodes.jsonl").read_text().splitlines()]
    groups: dict[Any, list[Any]] = {}
    for episode in episodes:
        if episode["split"] == "training":
            groups.setdefault((episode["step"], episode["group"]), []).append(episode["tokens"])
    assert groups
    for answers in groups.values():  # spread over two copies, which were both asked at once
        assert len(answers) > 1
        assert len({tuple(answer) for answer in answers}) == len(answers)
