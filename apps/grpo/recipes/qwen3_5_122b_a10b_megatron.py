"""Qwen3.5-122B-A10B on geometry problems with images, Megatron, four machines of eight GPUs."""

from apps.common.cluster import Cluster, Media, Pools, RolloutLayout
from apps.grpo.config import DataConfig, GrpoConfig
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import math
from apps.grpo.recipes.qwen3_5_35b_a3b_megatron import GEO3K_ROWS
from engines import EngineConfig
from rollout import Sampling
from runplan.model.model_shape import ModelShape, VisionTower
from runplan.model.origin import Origin

QWEN3_5_122B_A10B = ModelShape(
    name="Qwen3.5-122B-A10B",
    model_type="qwen3_5_moe_text",
    source="the published config.json's text part",
    layers=48,
    hidden=3072,
    heads=32,
    kv_heads=2,
    head_dim=256,
    vocab=248_320,
    experts=256,
    experts_per_token=8,
    expert_intermediate=1024,
    shared_expert_intermediate=1024,
    gated_attention=True,
    full_attention_interval=4,
    linear_key_heads=16,
    linear_value_heads=64,
    vision=VisionTower(),
)

RECIPE = Recipe(
    config=GrpoConfig(
        recipe="qwen3-5-122b-a10b-megatron",
        data=DataConfig(prompt_column="prompt", answer_column="reward_model.ground_truth", max_prompt_tokens=3240),
        nproc_per_node=8,
        steps=320,
        prompts_per_step=128,
        group_size=6,
        mini_batches=2,
        max_turns=1,
        max_episode_tokens=3240 + 4096,
        eval_every=10,
        save_every=50,
        engine=EngineConfig(
            backend="megatron",
            vision="trained",
            distributed_optimizer=True,
            device="cuda",
            tensor_parallel=2,
            pipeline_parallel=2,
            expert_parallel=8,
            max_tokens_per_rank=8192,
            gradient_checkpointing=True,
            optimizer_on_host=True,
            router_aux_loss_coef=0.0,
            collective_timeout_seconds=10_800,
            lr=1e-6,
        ),
        sampling=Sampling(max_new_tokens=4096),
        cluster=Cluster(
            pools=Pools(nodes=4, device_memory_gib=96),
            rollout=RolloutLayout(engine="vllm", sleep=True, tp=8, memory_share=0.66, max_model_tokens=15_768),
            offload=True,
            media=Media(images_column="images"),
            env=("CUDA_DEVICE_MAX_CONNECTIONS=1", "VLLM_ALLREDUCE_USE_SYMM_MEM=0"),
        ),
    ),
    make_tasks=math.make_tasks,
    origin=Origin(
        script="verl PR #5874, run_qwen3_5-122b-a10b-megatron.sh",
        shape=QWEN3_5_122B_A10B,
        dataset="geo3k",
        dataset_rows=GEO3K_ROWS,
        deviations=(
            "data are prepared beforehand and given by --data: the script wants the `hf` command on one node",
            "rows are packed, not padded: Megatron-Core 0.16 had no packed gated delta net, seqpack.ops has",
            "max_tokens_per_rank 8192 is a hard cap; the script's token caps were dead without dynamic batches",
            "prompts that are too long are left out and counted; the script both filters and cuts them on the right",
            "no KL coefficient: the script lists 0.01 and turns the term off",
            "20 epochs of 16 whole batches are 320 steps; the last rows of an epoch go into the next batch",
            "no bucket of 4096 MB: weights travel in pieces of any size, also the 1.4 GiB embedding",
            "gradients are offloaded with the weights; the script's grad_offload was read by nobody",
            "CUDA_VISIBLE_DEVICES and proxies are the launcher's business; VLLM_USE_V1 has no other value any more",
            "no prefix cache, which verl's default asks for",
            "without --eval-data 5 % of the training rows are held out; the script evaluates on the test split",
        ),
    ),
)
