"""Pictures shown to vLLM, from the recipe to the report: every hand-over reaches its tower, and is proven by images."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.grpo.main import run
from apps.grpo.testing.images import SERVED, SHARED, assert_tower_moved, image_config
from apps.grpo.testing.schedules import proofs, rows
from rollout import VllmEngine
from rollout.sync.pieces import Bucket
from rollout.workers.process import WorkerProcess
from schedules.config import Mode
from schedules.weights.weight_checks import WeightsNotTakenError

pytestmark = pytest.mark.skipif(
    "TESSERA_VLLM_PYTHON" not in os.environ, reason="TESSERA_VLLM_PYTHON names no interpreter with vLLM"
)


@pytest.mark.parametrize(
    ("mode", "tp"), [("sync", 1), ("one_step_off", 1), ("fully_async", 1), ("sync", 2), ("fully_async", 2)]
)
def test_a_run_trains_the_tower_and_vllm_sees_by_it(tmp_path: Path, mode: Mode, tp: int) -> None:
    """In one process of vLLM's, and in two workers that share each matrix; beside training in a process of its own."""
    run(image_config(tmp_path, mode, tp=tp), SHARED if tp > 1 else SERVED)
    steps = rows(tmp_path)[1:]
    assert [row["weights/version"] for row in steps] == [1, 2, 3]
    assert [row["rollout/failed_episodes"] for row in steps] == [0, 0, 0]
    assert max(proofs(steps)) < 0.03
    if mode == "sync":
        assert max(row["log_prob_difference"] for row in steps) < 0.03
    assert_tower_moved(tmp_path)


@pytest.mark.parametrize(("mode", "receiver"), [("sync", VllmEngine), ("fully_async", WorkerProcess)])
def test_a_tower_that_stays_old_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: Mode, receiver: Any
) -> None:
    """The probes show the step's pictures: those of text alone would not tell."""
    plain = receiver.receive

    async def receive(self: Any, bucket: Bucket) -> Any:
        for header in bucket.headers:
            if "visual.merger.linear_fc2.weight" in header.name:
                end = header.start + header.numel * header.dtype.itemsize
                part = bucket.buffer[header.start : end].view(header.dtype)
                part += 3 * torch.randn(part.shape, generator=torch.Generator().manual_seed(0))
        return await plain(self, bucket)

    monkeypatch.setattr(receiver, "receive", receive)
    with pytest.raises(WeightsNotTakenError, match="does not sample from the trainer's weights"):
        run(image_config(tmp_path, mode), SERVED)
