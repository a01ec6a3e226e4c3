"""Qwen3.5-397B-A17B on conversations of a file, Megatron, sixteen machines of eight GPUs."""

from apps.common.cluster import Cluster, Pools
from apps.sft.config import DataConfig, SftConfig
from apps.sft.recipe import Recipe
from engines import EngineConfig
from runplan.model.model_shape import ModelShape, VisionTower
from runplan.model.origin import Origin

QWEN3_5_397B_A17B = ModelShape(
    name="Qwen3.5-397B-A17B",
    model_type="qwen3_5_moe_text",
    source="the published config.json's text part",
    layers=60,
    hidden=4096,
    heads=32,
    kv_heads=2,
    head_dim=256,
    vocab=248_320,
    experts=512,
    experts_per_token=10,
    expert_intermediate=1024,
    shared_expert_intermediate=1024,
    gated_attention=True,
    full_attention_interval=4,
    linear_key_heads=16,
    linear_value_heads=64,
    vision=VisionTower(),
)

RECIPE = Recipe(
    SftConfig(
        recipe="qwen3-5-397b-a17b-megatron",
        data=DataConfig(max_tokens=2048),
        nproc_per_node=8,
        steps=1000,
        batch_size=128,
        eval_every=100,
        save_every=500,
        engine=EngineConfig(
            backend="megatron",
            distributed_optimizer=True,
            device="cuda",
            tensor_parallel=2,
            pipeline_parallel=4,
            expert_parallel=32,
            optimizer_on_host=True,
            max_tokens_per_rank=2048,
            gradient_checkpointing=True,
            lr=2e-5,
            lr_schedule="cosine",
            min_lr_ratio=0.1,
            warmup_steps=10,
            total_steps=1000,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            grad_clip=1.0,
        ),
        cluster=Cluster(
            pools=Pools(nodes=16, device_memory_gib=80),
        ),
    ),
    origin=Origin(
        script="verl PR #5381, examples/sft/gsm8k/run_qwen3_5_megatron.sh",
        shape=QWEN3_5_397B_A17B,
        dataset="conversations of your own",
        deviations=(
            "rows are packed, 2048 tokens a rank: eight micro-batches keep the stages busier than the script's four",
            "a share of the file is held out: the script has no validation file",
            "the learning rate falls over --trainer.total-steps; the script counts one epoch of a file of any size",
            "longer conversations are left out and counted, where the script stops",
        ),
    ),
)
