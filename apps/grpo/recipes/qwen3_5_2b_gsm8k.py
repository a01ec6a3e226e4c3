"""Qwen3.5-2B on GSM8K, one GPU of 80 GB, with vLLM beside training: --model Qwen/Qwen3.5-2B --data FILE."""

from dataclasses import replace

from apps.common.cluster import Cluster, RolloutLayout
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import math
from apps.grpo.recipes.qwen3_0_6b_gsm8k import RECIPE as SMALL

RECIPE = Recipe(
    config=replace(
        SMALL.config,
        recipe="qwen3-5-2b-gsm8k",
        engine=replace(SMALL.config.engine, gradient_checkpointing=True),
        cluster=Cluster(pools=SMALL.config.cluster.pools, rollout=RolloutLayout(engine="vllm", sleep=True)),
    ),
    make_tasks=math.make_tasks,
)
