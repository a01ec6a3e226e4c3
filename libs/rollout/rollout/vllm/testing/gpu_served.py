"""For tests of vLLM on GPUs: sizes of `rollout.vllm.testing.served`'s model that its kernels take, and tolerances."""

import asyncio
from dataclasses import replace
from typing import Any

from rollout.engine import Completion, Sampling
from rollout.vllm.engine import VllmEngine
from rollout.vllm.testing.served import PROMPTS

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 128,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
"""Which the kernels of a GPU take."""
HEADS: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
"""Which two workers share."""
ARGUMENTS: dict[str, Any] = {"additional_config": {"gdn_prefill_backend": "triton"}}
"""Triton's delta nets: those of FlashInfer are compiled on the spot."""
CLOSE, FAR = 0.2, 2.0
"""Mean distances in a model this wide: bfloat16 is 0.05 to 0.08 from float32, the last weights are 7 to 13 away."""
REASON = "needs a CUDA device, and TESSERA_VLLM_PYTHON: an interpreter with vLLM for it"


def of_copies(engine: VllmEngine) -> list[list[Completion]]:
    """Return the completions of every copy for all prompts, sampled at once."""
    copies = range(engine.config.data_parallel)

    async def ask() -> list[list[Completion]]:
        how = Sampling(max_new_tokens=8)
        requests = [engine.generate(p, replace(how, seed=i), copy=c) for c in copies for i, p in enumerate(PROMPTS)]
        answers = await asyncio.gather(*requests)
        return [answers[c * len(PROMPTS) : (c + 1) * len(PROMPTS)] for c in copies]

    return asyncio.run(ask())
