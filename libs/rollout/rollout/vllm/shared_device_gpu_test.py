"""Copies of a model on one accelerator: each samples from the weights in use, and takes its own share of the memory."""

import asyncio
import os
from dataclasses import replace

import pytest
import torch

from rollout.engine import Sampling
from rollout.testing.served import PROMPTS, VERSIONS, changed, config, distances, pieces, served
from rollout.vllm.engine import VllmEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or "TESSERA_VLLM_PYTHON" not in os.environ,
        reason="needs a CUDA device, and TESSERA_VLLM_PYTHON: an interpreter with vLLM for it",
    ),
]
SIZES = {
    "hidden_size": 256,
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
"""As in graphs_gpu_test.py."""
ARGUMENTS = {"additional_config": {"gdn_prefill_backend": "triton"}}
NEAR, FAR = 0.2, 2.0
SHARE, COPIES = 0.15, 2


def used():
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / total


def of_copies(engine):
    """The answers of every copy to all prompts, all at once."""

    async def ask():
        how = Sampling(max_new_tokens=8)
        asked = [engine.generate(p, replace(how, seed=i), copy=c) for c in range(COPIES) for i, p in enumerate(PROMPTS)]
        answers = await asyncio.gather(*asked)
        return [answers[c * len(PROMPTS) : (c + 1) * len(PROMPTS)] for c in range(COPIES)]

    return asyncio.run(ask())


def test_copies_that_share_a_device_sample_from_the_weights_in_use(tmp_path):
    model = served(**SIZES)
    model.save_pretrained(tmp_path)
    torch.zeros(1, device="cuda")
    before = used()
    own = config(
        data_parallel=COPIES,
        copies_per_device=COPIES,
        memory_share=SHARE,
        graph_sizes=(1, 4, 16),
        arguments=ARGUMENTS,
    )
    with VllmEngine(tmp_path, own) as engine:
        assert len(set(engine.pids)) == COPIES
        for answers in of_copies(engine):
            assert distances(model.cuda(), PROMPTS, answers).mean() < NEAR
        assert abs(used() - before - COPIES * SHARE) < 0.1
        new = changed(served(**SIZES))
        asyncio.run(engine.update_weights(next(VERSIONS), pieces(new)))
        for answers in of_copies(engine):
            assert distances(new.cuda(), PROMPTS, answers).mean() < NEAR
            assert distances(model.cuda(), PROMPTS, answers).mean() > FAR
