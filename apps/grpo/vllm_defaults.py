"""Memory that vLLM takes of a GPU where a command line leaves it open: what the plan of training leaves.

CUDA graphs and kernels are chosen by vLLM's process, which knows its device (`rollout.vllm.server.platforms`).
"""

from dataclasses import replace

from apps.grpo.config import GrpoConfig
from apps.grpo.recipe import Recipe
from apps.grpo.registry import spec_of
from rollout import RolloutConfig
from runplan.checks.machine import device_memory_gib, kind_here
from runplan.report.vllm_share import vllm_share


def settled(config: GrpoConfig, recipe: Recipe | None = None) -> GrpoConfig:
    """Return the configuration with vLLM's share of a GPU that it shares with training; any other one as it is."""
    layout, pools = config.cluster.rollout, config.cluster.pools
    alone = pools.placement != "colocated" or layout.ray_workers or layout.device == "cpu"
    if layout.engine != "vllm" or layout.memory_share or alone:
        return config
    spec = spec_of(config, recipe)
    if kind_here(spec) != "cuda" or (memory := pools.device_memory_gib or device_memory_gib(spec)) is None:
        return config
    share = vllm_share(spec, memory, layout.max_requests or RolloutConfig.max_batch)
    return replace(config, cluster=replace(config.cluster, rollout=replace(layout, memory_share=share)))
