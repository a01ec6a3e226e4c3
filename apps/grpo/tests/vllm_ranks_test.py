"""Two ranks train, and each samples its part of a step through a vLLM of its own."""

import os
from pathlib import Path

import pytest

from apps.common.cluster import RolloutLayout
from apps.grpo.main import run
from apps.grpo.testing.schedules import rows, served
from schedules.config import Mode, ScheduleConfig

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_both_ranks_samplers_take_each_steps_weights(tmp_path: Path, mode: Mode) -> None:
    """Both are proven by all ranks: their answers differ in length, and ranks must agree on what they score."""
    run(served(tmp_path, RolloutLayout("vllm"), ScheduleConfig(mode), nproc_per_node=2))
    logged = rows(tmp_path)
    assert logged[0]["run/world_size"] == 2
    assert [row["weights/version"] for row in logged[1:]] == [1, 2, 3]
    assert [row["rollout/failed_episodes"] for row in logged[1:]] == [0, 0, 0]
    assert max(row["weights/check/abs"] for row in logged[1:]) < 0.03
    if mode == "sync":
        assert max(row["log_prob_difference"] for row in logged[1:]) < 0.03
