"""A run whose vLLM has two workers: of one rank, and of two ranks that sample through the first one's."""

import os
from pathlib import Path

import pytest

from apps.common.cluster import RolloutLayout
from apps.grpo.main import run
from apps.grpo.testing.schedules import SHARED, proofs, rows, served
from schedules.config import Mode, ScheduleConfig

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)


@pytest.mark.parametrize(("mode", "processes"), [("sync", 2), ("one_step_off", 2), ("fully_async", 1)])
def test_every_steps_weights_are_proven_to_be_in_both_workers(tmp_path: Path, mode: Mode, processes: int) -> None:
    run(served(tmp_path, RolloutLayout("vllm", tp=2), ScheduleConfig(mode), nproc_per_node=processes), SHARED)
    logged = rows(tmp_path)
    assert logged[0]["run/world_size"] == processes
    assert [row["weights/version"] for row in logged[1:]] == [1, 2, 3]
    assert [row["rollout/failed_episodes"] for row in logged[1:]] == [0, 0, 0]
    assert max(proofs(logged[1:])) < 0.03
