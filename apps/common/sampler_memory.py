"""Memory of a run's sampler beside training, where the settings leave it to the plan."""

from collections.abc import Callable
from dataclasses import replace

from apps.common.cluster import Cluster, RolloutLayout
from rollout import RolloutConfig
from runplan.checks.machine import device_memory_gib, kind_here
from runplan.estimates.states import GIB
from runplan.report.native_share import native_share
from runplan.report.vllm_share import vllm_share
from runplan.run_spec import RunSpec


def settled_layout(cluster: Cluster, spec_of: Callable[[], RunSpec]) -> RolloutLayout:
    """Return the rollout settings with vLLM's share of a GPU that training has too, or with a bound of the native
    sampler's caches where its requests might need more than training leaves; any others as they are.

    `spec_of`: the run.
    """
    layout, pools = cluster.rollout, cluster.pools
    if layout.engine == "native":
        return layout if layout.kv_cache_memory_gib else _with_bound(layout, pools.device_memory_gib, spec_of)
    alone = pools.placement != "colocated" or layout.ray_workers or layout.device == "cpu"
    if layout.engine != "vllm" or layout.memory_share or alone:
        return layout
    spec = spec_of()
    if kind_here(spec) != "cuda" or (memory := pools.device_memory_gib or device_memory_gib(spec)) is None:
        return layout
    return replace(layout, memory_share=vllm_share(spec, memory, layout.max_requests or RolloutConfig.max_batch))


def _with_bound(layout: RolloutLayout, memory: float | None, spec_of: Callable[[], RunSpec]) -> RolloutLayout:
    """Return the settings with a bound of the caches, of devices with `memory` GiB, this machine's where None."""
    try:
        spec = spec_of()
    except ValueError:  # told, with the flag, where the values are checked
        return layout
    if (memory := memory or device_memory_gib(spec)) is None or (most := native_share(spec, memory)) is None:
        return layout
    return replace(layout, kv_cache_memory_gib=most)


def cache_bytes(layout: RolloutLayout) -> int | None:
    """Return the bytes of the native sampler's caches at most; None without a bound."""
    return None if layout.kv_cache_memory_gib is None else max(1, int(layout.kv_cache_memory_gib * GIB))
