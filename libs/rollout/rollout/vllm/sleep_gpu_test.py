"""The colocated cycle on one CUDA device: trainer and vLLM take turns with its memory, ten times."""

import asyncio
import os
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from rollout.engine import Sampling
from rollout.sync.manifest import Manifest
from rollout.sync.pieces import buckets
from rollout.sync.transfer import transfer_weights
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.gpu_served import ARGUMENTS, CLOSE, FAR, REASON, SIZES
from rollout.vllm.testing.served import PROMPTS, VERSIONS, changed, config, distances, pieces, sample, served

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or "TESSERA_VLLM_PYTHON" not in os.environ,
        reason=REASON,
    ),
]
MIB = 1 << 20


def used() -> int:
    """Bytes of the device that anybody holds."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def test_ten_cycles_do_not_make_the_peak_grow(tmp_path: Path) -> None:
    """Offload, wake, sync, generate, sleep, onload: each time the new weights answer, and asleep vLLM holds little."""
    model = served(**SIZES)
    model.save_pretrained(tmp_path)
    awake, asleep, trained = list[int](), list[int](), list[int]()
    started = config(sleep=True, memory_share=0.2, arguments=ARGUMENTS)
    with VllmEngine(tmp_path, started) as engine:
        asyncio.run(engine.sleep())
        for cycle in range(10):
            last = deepcopy(model.cpu())
            model = changed(model, seed=cycle)
            asyncio.run(engine.wake())
            stream = buckets(pieces(model), 1 << 20)
            asyncio.run(transfer_weights([engine], Manifest(next(VERSIONS)), stream))
            answers = sample(engine, PROMPTS, Sampling(max_new_tokens=8))
            awake.append(used())
            asyncio.run(engine.sleep())
            asleep.append(used())
            model = model.cuda()
            trained.append(used())
            near, far = (distances(m.cuda(), PROMPTS, answers).mean() for m in (model, last))  # kernels want the device
            print(cycle, near, far)
            assert near < CLOSE
            assert far > FAR
            del last
    for held in (awake, asleep, trained):
        print([round(bytes_ / MIB) for bytes_ in held])
        assert max(held[2:]) <= held[1] + 64 * MIB, held  # the first cycle loads kernels into this process too
    assert min(awake) - max(asleep) > 1024 * MIB  # most of its share are caches
