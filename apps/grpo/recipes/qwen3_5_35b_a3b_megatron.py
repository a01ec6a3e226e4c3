"""Qwen3.5-35B-A3B on geometry problems with images, Megatron, one machine of eight GPUs."""

from apps.common.cluster import Cluster, Media, Pools, RolloutLayout
from apps.grpo.config import DataConfig, GrpoConfig
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import math
from engines import EngineConfig
from objectives import GRPO
from rollout import Sampling
from runplan.model.model_shape import ModelShape, VisionTower
from runplan.model.origin import Origin

QWEN3_5_35B_A3B = ModelShape(
    name="Qwen3.5-35B-A3B",
    model_type="qwen3_5_moe_text",
    source="the defaults of transformers' Qwen3_5MoeTextConfig",
    layers=40,
    hidden=2048,
    heads=16,
    kv_heads=2,
    head_dim=256,
    vocab=248_320,
    experts=256,
    experts_per_token=8,
    expert_intermediate=512,
    shared_expert_intermediate=512,
    gated_attention=True,
    full_attention_interval=4,
    linear_key_heads=16,
    linear_value_heads=32,
    vision=VisionTower(),
)
GEO3K_ROWS = 2101
GEO3K = DataConfig(prompt_column="prompt", answer_column="reward_model.ground_truth", max_prompt_tokens=1024)

RECIPE = Recipe(
    config=GrpoConfig(
        recipe="qwen3-5-35b-a3b-megatron",
        data=GEO3K,
        nproc_per_node=8,
        steps=975,
        prompts_per_step=32,
        group_size=5,
        max_turns=1,
        max_episode_tokens=1024 + 2048,
        eval_every=5,
        save_every=20,
        engine=EngineConfig(
            backend="megatron",
            vision="trained",
            distributed_optimizer=True,
            device="cuda",
            tensor_parallel=2,
            expert_parallel=8,
            max_tokens_per_rank=4096,
            gradient_checkpointing=True,
            optimizer_on_host=True,
            router_aux_loss_coef=0.01,
            router_z_loss_coef=0.001,
            lr=1e-6,
        ),
        sampling=Sampling(max_new_tokens=2048),
        objective=GRPO(kl_coef=0.01, kl_estimator="k3"),
        cluster=Cluster(
            pools=Pools(device_memory_gib=80),
            rollout=RolloutLayout(engine="vllm", sleep=True, tp=8, memory_share=0.6),
            offload=True,
            media=Media(images_column="images"),
            env=("CUDA_DEVICE_MAX_CONNECTIONS=1", "VLLM_ALLREDUCE_USE_SYMM_MEM=0"),
        ),
    ),
    make_tasks=math.make_tasks,
    origin=Origin(
        script="verl PR #5381, run_qwen3_5-35b-megatron.sh",
        shape=QWEN3_5_35B_A3B,
        dataset="geo3k",
        dataset_rows=GEO3K_ROWS,
        deviations=(
            "rows are packed, not padded: Megatron-Core 0.16 had no packed gated delta net, seqpack.ops has",
            "max_tokens_per_rank 4096 is a hard cap; the script's token caps were dead without dynamic batches",
            "prompts that are too long are left out and counted, where truncation='error' stopped the run",
            "15 epochs of 65 whole batches are 975 steps; the last rows of an epoch go into the next batch",
            "gradients are offloaded with the weights; the script's grad_offload was read by nobody",
            "the optimizer lives on the host alone: of the script's optimizer_offload nothing is left to move",
            "VLLM_USE_V1 is left out: vLLM has had no other engine since 0.11",
            "no prefix cache, which verl's default asks for",
            "without --eval-data 5 % of the training rows are held out; the script evaluates on the test split",
        ),
    ),
)
