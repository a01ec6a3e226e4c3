"""What a sampler does where a command line leaves it open: its memory is what the plan of training leaves.

CUDA graphs and kernels are chosen by vLLM's process, which knows its device (`rollout.vllm.server.platforms`).
"""

from collections.abc import Iterator
from dataclasses import replace

from apps.common.sampler_memory import settled_layout
from apps.grpo.config import GrpoConfig
from apps.grpo.recipe import Recipe
from apps.grpo.registry import spec_of
from runplan.checks.machine import kind_here


def settled(config: GrpoConfig, recipe: Recipe | None = None) -> GrpoConfig:
    """Return the configuration with the sampler's memory beside training, where the plan decides it; else as it is."""
    layout = settled_layout(config.cluster, lambda: spec_of(config, recipe))
    same = layout is config.cluster.rollout
    return config if same else replace(config, cluster=replace(config.cluster, rollout=layout))


def along_with_vllm(config: GrpoConfig) -> Iterator[str]:
    """Yield the paths of the settings that are on where a flag asks for vLLM on a GPU: the prefix cache, not of delta
    nets, as vLLM has it; and sleep, where training has the same GPU and waits for responses."""
    layout = config.cluster.rollout
    if layout.engine != "vllm" or layout.device == "cpu":
        return
    try:
        spec = spec_of(config)
    except ValueError:  # told, with the flag, where the values are checked
        return
    if kind_here(spec) != "cuda":
        return
    if spec.shape is not None and not spec.shape.linear_layers:
        yield "cluster.rollout.prefix_cache"
    shared = config.cluster.pools.placement == "colocated" and not layout.ray_workers
    if shared and config.cluster.schedule.mode == "sync":
        yield "cluster.rollout.sleep"
