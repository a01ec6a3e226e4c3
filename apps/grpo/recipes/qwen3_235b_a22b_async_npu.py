"""Qwen3-235B-A22B on school mathematics, fully asynchronous, 128 Ascend NPUs that train and 128 that sample."""

from apps.common.cluster import Cluster, Pools, RolloutLayout
from apps.grpo.config import DataConfig, GrpoConfig
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import math
from engines import EngineConfig
from objectives import GRPO
from rollout import Sampling
from runplan.model.model_shape import ModelShape
from runplan.model.origin import Origin
from schedules.config import ScheduleConfig

QWEN3_235B_A22B = ModelShape(
    name="Qwen3-235B-A22B",
    model_type="qwen3_moe",
    source="the published config.json",
    layers=94,
    hidden=4096,
    heads=64,
    kv_heads=4,
    head_dim=128,
    vocab=151_936,
    experts=128,
    experts_per_token=8,
    expert_intermediate=1536,
)

RECIPE = Recipe(
    config=GrpoConfig(
        recipe="qwen3-235b-a22b-async-npu",
        data=DataConfig(prompt_column="prompt", answer_column="reward_model.ground_truth", max_prompt_tokens=8192),
        nproc_per_node=16,
        steps=583,
        prompts_per_step=128,
        group_size=16,
        max_turns=1,
        max_episode_tokens=8192 + 4096,
        eval_every=100,
        save_every=100,
        engine=EngineConfig(
            backend="megatron",
            distributed_optimizer=True,
            device="npu",
            tensor_parallel=4,
            pipeline_parallel=8,
            first_stage_layers=11,
            last_stage_layers=11,
            expert_parallel=4,
            expert_tensor_parallel=4,
            lr=1e-6,
            weight_decay=0.1,
            gradient_checkpointing=True,
            max_tokens_per_rank=12_288,
        ),
        sampling=Sampling(max_new_tokens=4096),
        objective=GRPO(kl_coef=0.001, kl_estimator="k3"),
        cluster=Cluster(
            pools=Pools(nodes=8, placement="separate", rollout_nodes=8, device_memory_gib=64),
            rollout=RolloutLayout(
                engine="vllm",
                tp=8,
                dp=8,
                ep=64,
                ray_workers=2,
                memory_share=0.75,
                max_model_tokens=32_768,
                max_batched_tokens=1024,
                chunked_prefill=True,
                prefix_cache=True,
                cuda_graph_sizes=(8, 16, 32, 64, 128),
            ),
            schedule=ScheduleConfig(mode="fully_async", staleness_threshold=0.5, partial_rollout=True),
        ),
    ),
    make_tasks=math.make_tasks,
    origin=Origin(
        script="verl PR #6012, grpo_qwen3_235b_megatron_npu.sh",
        shape=QWEN3_235B_A22B,
        dataset="gsm8k",
        dataset_rows=7473,
        deviations=(
            "583 steps are 10 epochs; the script asks for 204,800 samples, which verl cuts to 74,730 without a word",
            "the learning rate is constant by name; the script counts its decay in samples instead of steps",
            "etp 4 is written down: the script leaves it out, and Megatron-Core then takes tp",
            "scoring uses the same token cap as training; the script scores four rows at once and trains one",
            "held-out prompts, at most 256 of the training rows, are asked every 100 steps; the script never evaluates",
            "graphs are captured for powers of two from 8 to 128",
            "temperature 1 and the whole distribution: the script's own variables for them were used by nobody",
            "two engines of 64 NPUs fill the rollout nodes",
            "nothing is offloaded: the script offloads weights and optimizer, though training has its own devices",
            "no bound drops the oldest sample: sampling pauses when the queue is full",
            "tokens that older weights sampled are weighed by mask; the script names no correction",
        ),
    ),
)
