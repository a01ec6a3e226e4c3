"""Qwen3.5-35B-A3B on geometry problems with images, FSDP2, one machine of eight GPUs."""

from dataclasses import replace

from apps.grpo.recipe import Recipe
from apps.grpo.recipes import math, qwen3_5_27b_fsdp2
from apps.grpo.recipes.qwen3_5_35b_a3b_megatron import QWEN3_5_35B_A3B

DENSE = qwen3_5_27b_fsdp2.RECIPE
ROUTER_LOSS = 0.001
"""The coefficient in the published config.json, which does not ask for the loss."""

assert DENSE.origin is not None
RECIPE = Recipe(
    config=replace(
        DENSE.config,
        recipe="qwen3-5-35b-a3b-fsdp2",
        engine=replace(DENSE.config.engine, router_aux_loss_coef=ROUTER_LOSS),
    ),
    make_tasks=math.make_tasks,
    origin=replace(
        DENSE.origin,
        script="verl PR #5682, the 35B-A3B variant of run_qwen3_5_27b_vllm_fsdp.sh",
        shape=QWEN3_5_35B_A3B,
        deviations=(
            *DENSE.origin.deviations,
            "the router's auxiliary loss is in the loss: the script's model code returned logits and dropped it",
        ),
    ),
)
