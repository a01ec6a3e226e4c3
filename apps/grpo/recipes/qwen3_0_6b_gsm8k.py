"""Qwen3-0.6B on GSM8K, one GPU of 80 GB, with vLLM beside training: --model Qwen/Qwen3-0.6B --data FILE."""

from apps.common.cluster import Cluster, Pools, RolloutLayout
from apps.grpo.config import DataConfig, GrpoConfig, PluginConfig
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import math
from engines import EngineConfig
from rollout import Sampling

RECIPE = Recipe(
    config=GrpoConfig(
        recipe="qwen3-0-6b-gsm8k",
        data=DataConfig(max_prompt_tokens=512),
        plugins=PluginConfig(preset="gsm8k", template_options=("enable_thinking=false",)),
        steps=200,
        prompts_per_step=64,
        group_size=8,
        max_turns=1,
        max_episode_tokens=512 + 1024,
        eval_every=20,
        save_every=50,
        engine=EngineConfig(device="cuda", lr=1e-6, warmup_steps=5, max_tokens_per_rank=16384),
        sampling=Sampling(max_new_tokens=1024),
        cluster=Cluster(
            pools=Pools(device_memory_gib=80), rollout=RolloutLayout(engine="vllm", sleep=True, prefix_cache=True)
        ),
    ),
    make_tasks=math.make_tasks,
)
