"""Qwen3.5-27B on geometry problems with images, FSDP2, one machine of sixteen Ascend NPUs."""

from dataclasses import replace

from apps.common.cluster import Pools
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import math, qwen3_5_27b_fsdp2

GPU = qwen3_5_27b_fsdp2.RECIPE
HCCL = (
    "HCCL_CONNECT_TIMEOUT=1500",
    "HCCL_HOST_SOCKET_PORT_RANGE=60000-60050",
    "HCCL_NPU_SOCKET_PORT_RANGE=61000-61050",
)
NPU_DEVIATIONS = (
    "GPU and NPU are two recipes: the script's NPU branch overwrote the number of devices and of shards",
    "two separate port ranges for HCCL's host and device sockets, of fifty ports each",
    "the variable that keeps Ray from choosing NPUs is left out: torchrun starts the ranks of one machine",
)

assert GPU.origin is not None
RECIPE = Recipe(
    config=replace(
        GPU.config,
        recipe="qwen3-5-27b-fsdp2-npu",
        nproc_per_node=16,
        engine=replace(GPU.config.engine, device="npu"),
        cluster=replace(GPU.config.cluster, pools=Pools(device_memory_gib=64), env=HCCL),
    ),
    make_tasks=math.make_tasks,
    origin=replace(
        GPU.origin,
        script="verl PR #5682, the NPU variant of run_qwen3_5_27b_vllm_fsdp.sh",
        deviations=(*GPU.origin.deviations, *NPU_DEVIATIONS),
    ),
)
