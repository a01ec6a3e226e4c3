"""Qwen3.5-27B on geometry problems with images, FSDP2, one machine of eight GPUs."""

from apps.common.cluster import Cluster, Media, Pools, RolloutLayout
from apps.grpo.config import GrpoConfig
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import math
from apps.grpo.recipes.qwen3_5_35b_a3b_megatron import GEO3K, GEO3K_ROWS
from engines import EngineConfig
from objectives import GRPO
from rollout import Sampling
from runplan.model.model_shape import ModelShape, VisionTower
from runplan.model.origin import Origin

QWEN3_5_27B = ModelShape(
    name="Qwen3.5-27B",
    model_type="qwen3_5_text",
    source="the published config.json's text part",
    layers=64,
    hidden=5120,
    heads=24,
    kv_heads=4,
    head_dim=256,
    vocab=248_320,
    intermediate=17_408,
    gated_attention=True,
    full_attention_interval=4,
    linear_key_heads=16,
    linear_value_heads=48,
    vision=VisionTower(),
)

RECIPE = Recipe(
    config=GrpoConfig(
        recipe="qwen3-5-27b-fsdp2",
        data=GEO3K,
        nproc_per_node=8,
        steps=480,
        prompts_per_step=64,
        group_size=5,
        mini_batches=4,
        max_turns=1,
        max_episode_tokens=1024 + 2048,
        eval_every=5,
        save_every=5,
        engine=EngineConfig(
            device="cuda",
            vision="trained",
            lr=1e-6,
            gradient_checkpointing=True,
            optimizer_on_host=True,
            max_tokens_per_rank=6144,
        ),
        sampling=Sampling(max_new_tokens=2048),
        objective=GRPO(kl_coef=0.01, kl_estimator="k3"),
        cluster=Cluster(
            pools=Pools(device_memory_gib=80),
            rollout=RolloutLayout(
                engine="vllm", sleep=True, tp=4, memory_share=0.6, max_batched_tokens=8192, chunked_prefill=True
            ),
            offload=True,
            media=Media(images_column="images"),
        ),
    ),
    make_tasks=math.make_tasks,
    origin=Origin(
        script="verl PR #5682, run_qwen3_5_27b_vllm_fsdp.sh",
        shape=QWEN3_5_27B,
        dataset="geo3k",
        dataset_rows=GEO3K_ROWS,
        deviations=(
            "two rows of full length share a micro-batch: the script held one, which hid a leak between packed rows",
            "rows are shuffled anew in every pass; the script kept the file's order",
            "no bucket of 6144 MB: weights travel in pieces of any size, also the 2.4 GiB embedding",
            "entropy is computed in chunks of --trainer.logit-chunk tokens where it is asked for; here it is not",
            "a run goes on with --resume; the script's resume_from_path had no effect without resume_mode",
            "15 epochs of 32 whole batches are 480 steps; the last rows of an epoch go into the next batch",
            "checkpoints and environment are settings of this file; the script computed both and used neither",
            "weights are offloaded while answers are sampled; in training only the optimizer states are on the host",
            "without --eval-data 5 % of the training rows are held out; the script evaluates on the test split",
        ),
    ),
)
