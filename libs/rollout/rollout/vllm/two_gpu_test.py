"""vLLM over two accelerators, as workers that share a model or as copies of it: it samples from the weights in use."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout.testing.listen_addresses import listen_addresses
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.gpu_served import ARGUMENTS, CLOSE, FAR, HEADS, SIZES, of_copies
from rollout.vllm.testing.served import PROMPTS, VERSIONS, changed, config, distances, pieces, served

DEVICES = 2
pytestmark = [
    pytest.mark.gpu2,
    pytest.mark.skipif(
        torch.cuda.device_count() < DEVICES or "TESSERA_VLLM_PYTHON" not in os.environ,
        reason=f"needs {DEVICES} CUDA devices, and TESSERA_VLLM_PYTHON: an interpreter with vLLM for them",
    ),
]
DEVICE = "cuda"
SHARE = 0.15
SPREAD: dict[str, dict[str, Any]] = {"workers": {"tensor_parallel": 2}, "copies": {"data_parallel": 2}}


def taken(before: list[int]) -> list[float]:
    """Of each device, the share of its memory that others took since."""
    now = [torch.cuda.mem_get_info(device) for device in range(DEVICES)]
    return [(free - left) / total for free, (left, total) in zip(before, now, strict=True)]


async def updated(engine: VllmEngine, model: Any) -> dict[str, set[str]]:
    """Who listened where while the engine took the weights."""
    found: dict[str, set[str]] = {}
    done = asyncio.Event()

    async def watch() -> None:
        while not done.is_set():
            for name, addresses in (await asyncio.to_thread(listen_addresses)).items():
                found.setdefault(name, set()).update(addresses)
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0.5)
    await engine.update_weights(next(VERSIONS), pieces(model))
    done.set()
    await watching
    return found


@pytest.mark.parametrize("spread", SPREAD)
def test_each_device_has_its_part_and_samples_from_the_weights_in_use(tmp_path: Path, spread: str) -> None:
    model = served(**SIZES, **HEADS)
    model.save_pretrained(tmp_path)
    model.to(DEVICE)
    for device in range(DEVICES):
        torch.zeros(1, device=f"{DEVICE}:{device}")  # this process's own part of each device's memory
    before = [torch.cuda.mem_get_info(device)[0] for device in range(DEVICES)]
    with VllmEngine(tmp_path, config(**SPREAD[spread], memory_share=SHARE, arguments=ARGUMENTS)) as engine:
        assert len(set(engine.pids)) == engine.config.data_parallel
        assert len(engine.info["workers"]) == (2 if spread == "workers" else 0)
        assert all(abs(share - SHARE) < 0.1 for share in taken(before))
        for answers in of_copies(engine):
            assert distances(model, PROMPTS, answers).mean() < CLOSE
        for seed in (1, 2, 3):  # each place is written again
            last, model = model, changed(served(**SIZES, **HEADS), seed).to(DEVICE)
            found = asyncio.run(updated(engine, model))
            print(spread, found)
            assert found or spread == "copies", "workers that find each other listen somewhere"
            assert set().union(*found.values()) <= {"127.0.0.1"}, found
            for answers in of_copies(engine):
                assert distances(model, PROMPTS, answers).mean() < CLOSE
                assert distances(last, PROMPTS, answers).mean() > FAR
