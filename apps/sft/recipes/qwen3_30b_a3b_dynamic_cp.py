"""Qwen3-30B-A3B on conversations of very different lengths, with dynamic context parallelism, on eight GPUs."""

from apps.common.cluster import Cluster, Pools
from apps.sft.config import DataConfig, SftConfig
from apps.sft.recipe import Recipe
from engines import EngineConfig
from runplan.model.model_shape import ModelShape
from runplan.model.origin import Origin

QWEN3_30B_A3B = ModelShape(
    name="Qwen3-30B-A3B",
    model_type="qwen3_moe",
    source="the published config.json",
    layers=48,
    hidden=2048,
    heads=32,
    kv_heads=4,
    head_dim=128,
    vocab=151_936,
    experts=128,
    experts_per_token=8,
    expert_intermediate=768,
)

RECIPE = Recipe(
    SftConfig(
        recipe="qwen3-30b-a3b-dynamic-cp",
        data=DataConfig(max_tokens=32_768),
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
            expert_parallel=8,
            context_parallel="dynamic",
            max_tokens_per_rank=8192,
            gradient_checkpointing=True,
            lr=1e-5,
            warmup_steps=10,
        ),
        cluster=Cluster(pools=Pools(device_memory_gib=80), env=("CUDA_DEVICE_MAX_CONNECTIONS=1",)),
    ),
    origin=Origin(
        script="verl PR #5057, dynamic context parallelism",
        shape=QWEN3_30B_A3B,
        dataset="conversations of your own",
        deviations=(
            "dyncp plans it, and megatron-core knows of one rank a sequence: the script needs its development build",
            "TP2, EP8 and the distributed optimizer are ours: the change names no layout",
            "groups of any size, several sizes at once: the script takes one power of two for a whole micro-batch",
            "the loss is divided by the batch's own tokens; the script's normalisation was wrong (#5869)",
            "batches with fewer rows than ranks work; the script fell back or failed an assertion",
            "outputs are merged as tensors; the script pickled them",
            "batch, lengths and learning rate are ours: the change names none",
            "without --eval-data a share of the rows is held out",
        ),
    ),
)
