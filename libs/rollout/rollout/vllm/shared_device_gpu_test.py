"""Copies of a model on one accelerator: each samples from the weights in use, and takes its own share of the memory."""

import asyncio
import os
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from rollout.sync.manifest import Manifest
from rollout.sync.pieces import buckets
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.gpu_served import ARGUMENTS, CLOSE, FAR, REASON, SIZES, of_copies
from rollout.vllm.testing.served import PROMPTS, VERSIONS, changed, config, distances, pieces, served

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or "TESSERA_VLLM_PYTHON" not in os.environ,
        reason=REASON,
    ),
]
SHARE, COPIES = 0.15, 2


def used() -> float:
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / total


async def taken_back(engine: VllmEngine, model: PreTrainedModel) -> None:
    """New weights in use, and the last ones again, as where another receiver failed."""
    version = next(VERSIONS)
    await engine.prepare(Manifest(version))
    for bucket in buckets(pieces(model), 1 << 20):
        await engine.receive(bucket)
    await engine.commit(version)
    await engine.abort()


@pytest.mark.parametrize("on_device", [False, True])
def test_copies_that_share_a_device_sample_from_the_weights_in_use(tmp_path: Path, on_device: bool) -> None:
    model = served(**SIZES)
    model.save_pretrained(tmp_path)
    model.cuda()
    torch.zeros(1, device="cuda")
    before = used()
    own = config(
        data_parallel=COPIES,
        copies_per_device=COPIES,
        memory_share=SHARE,
        weights_on_device=on_device,
        graph_sizes=(1, 4, 16),
        arguments=ARGUMENTS,
    )
    with VllmEngine(tmp_path, own) as engine:
        assert len(set(engine.pids)) == COPIES
        for answers in of_copies(engine):
            assert distances(model, PROMPTS, answers).mean() < CLOSE
        assert abs(used() - before - COPIES * SHARE) < 0.1
        for seed in (1, 2, 3):  # each place is written again
            last, model = model, changed(served(**SIZES), seed).cuda()
            asyncio.run(engine.update_weights(next(VERSIONS), pieces(model)))
            for answers in of_copies(engine):
                assert distances(model, PROMPTS, answers).mean() < CLOSE
                assert distances(last, PROMPTS, answers).mean() > FAR
        asyncio.run(taken_back(engine, changed(served(**SIZES), 4).cuda()))
        for answers in of_copies(engine):
            assert distances(model, PROMPTS, answers).mean() < CLOSE
