"""One GPU, taken in turn by training and by vLLM for ten steps: each gives its memory back, and none of it grows.

    TESSERA_VLLM_PYTHON=PYTHON python -m pytest -s apps/grpo/tests/sleep_gpu_test.py

Memory of the device is what all processes hold of it; of the host, resident pages of the run and its processes, but for
torch's compile workers. There is one for each core once something is compiled that no cache holds, FlashQLA's norm for
instance, and pages that they share would count for each: 6 GB on sixteen cores, at whatever step that was.
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from apps.common.cluster import RolloutLayout
from apps.grpo.main import run
from apps.grpo.testing.gpu import TRITON, gpu_served
from apps.grpo.testing.schedules import proofs, rows, small
from engines import EngineConfig
from engines.step import Engine
from rollout import VllmEngine
from schedules.config import ScheduleConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or "TESSERA_VLLM_PYTHON" not in os.environ,
        reason="needs a CUDA device, and TESSERA_VLLM_PYTHON: an interpreter with vLLM for it",
    ),
]
STEPS = 10
MIB = 2**20
WIDE = 16384
"""Of the MLPs: 51M parameters, whose states in training are 0.6 GB."""


def device_mib() -> float:
    """What everybody holds of the device."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


def host_mib() -> float:
    """Pages of this process and its children, without compile workers; those that they share are counted for each."""
    own = psutil.Process()
    living = (child for child in own.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE)
    below = (child for child in living if "compile_worker" not in " ".join(child.cmdline()))
    return float(sum(process.memory_info().rss for process in (own, *below)) / MIB)


def test_ten_steps_in_turn_on_one_device_take_no_more_than_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling, training, host, peaks = [], [], [], []
    plain_wake, plain_train = VllmEngine.wake, Engine.train_batch

    async def wake(self: VllmEngine) -> None:
        await plain_wake(self)
        sampling.append(device_mib())
        host.append(host_mib())

    def train(self: Engine, *args: Any, **options: Any) -> Any:
        training.append(device_mib())
        torch.cuda.reset_peak_memory_stats()
        found = plain_train(self, *args, **options)
        peaks.append(torch.cuda.max_memory_allocated() / MIB)
        return found

    monkeypatch.setattr(VllmEngine, "wake", wake)
    monkeypatch.setattr(Engine, "train_batch", train)
    layout = RolloutLayout("vllm", sleep=True, memory_share=0.2, max_requests=32, vllm=TRITON)
    config = small(tmp_path, ScheduleConfig(), steps=STEPS, save_every=STEPS, eval_every=STEPS, keep_checkpoints=0)
    engine = EngineConfig(device="cuda", lr=1e-3, compile="off")
    run(replace(config, engine=engine, cluster=replace(config.cluster, rollout=layout, offload=True)), gpu_served(WIDE))

    steps = rows(tmp_path)[1:]
    print({"sampling": sampling, "training": training, "peaks": peaks, "host": host})
    assert [row["weights/version"] for row in steps] == list(range(1, STEPS + 1))
    assert max(proofs(steps)) < 0.05, "each step's weights are sampled from"
    assert len(training) == STEPS
    assert len(sampling) >= STEPS
    share = 0.2 * torch.cuda.mem_get_info()[1] / MIB
    assert max(training) < min(sampling) - 0.5 * share, "vLLM's share of the device is free while the trainer has it"
    for name, taken, room in (("sampling", sampling, 64), ("training", training, 64), ("host", host, 256)):
        begun = 3 * len(taken) // STEPS  # vLLM wakes twice a step: for its answers, and to prove its new weights
        assert max(taken[begun:]) <= max(taken[:begun]) + room, f"{name} grew: {taken}"
    # rows are of other lengths in each step, and so are their activations
    assert max(peaks[2:]) <= 1.25 * max(peaks[:2]), f"a step's own peak grew: {peaks}"
