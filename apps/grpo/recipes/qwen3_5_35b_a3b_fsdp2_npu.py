"""Qwen3.5-35B-A3B on geometry problems with images, FSDP2, one machine of sixteen Ascend NPUs."""

from dataclasses import replace

from apps.grpo.recipe import Recipe
from apps.grpo.recipes import math, qwen3_5_27b_fsdp2_npu, qwen3_5_35b_a3b_fsdp2

GPU, NPU = qwen3_5_35b_a3b_fsdp2.RECIPE, qwen3_5_27b_fsdp2_npu.RECIPE

assert GPU.origin is not None
RECIPE = Recipe(
    config=replace(
        NPU.config,
        recipe="qwen3-5-35b-a3b-fsdp2-npu",
        engine=replace(NPU.config.engine, router_aux_loss_coef=GPU.config.engine.router_aux_loss_coef),
    ),
    make_tasks=math.make_tasks,
    origin=replace(
        GPU.origin,
        script="verl PR #5682, the 35B-A3B NPU variant of run_qwen3_5_27b_vllm_fsdp.sh",
        deviations=(*GPU.origin.deviations, *qwen3_5_27b_fsdp2_npu.NPU_DEVIATIONS),
    ),
)
