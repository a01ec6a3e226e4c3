"""Helpers of tests on GPUs: the quickstart's model in sizes that vLLM's kernels for GPUs take."""

import functools
from dataclasses import replace

from transformers import Qwen3_5TextConfig

from apps.grpo.recipe import Recipe
from apps.grpo.testing.recipe import RECIPE
from apps.quickstart.model import ensure_tiny_model, tiny_config
from rollout.vllm.testing.gpu_served import HEADS, SIZES

TRITON = ('additional_config={"gdn_prefill_backend":"triton"}',)
"""Of `RolloutLayout.vllm`: delta nets that need no compiler at the start."""


def gpu_served(intermediate_size: int = 256) -> Recipe:
    """Return the tests' recipe with that model; `intermediate_size` sets the size of its weights."""

    def config(vocab_size: int, pad_token_id: int, eos_token_id: int) -> Qwen3_5TextConfig:
        made = tiny_config(vocab_size, pad_token_id, eos_token_id)
        for name, value in (SIZES | HEADS | {"initializer_range": 0.02}).items():
            setattr(made, name, value)
        made.intermediate_size = intermediate_size
        return made

    return replace(RECIPE, make_model=functools.partial(ensure_tiny_model, make_config=config))
