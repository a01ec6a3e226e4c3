"""Memory that the native sampler's caches may take beside training, by the plan of both."""

from rollout.config import CACHE_PART
from runplan.estimates.states import GIB, width_of
from runplan.report.memory_lines import peak_of, split_of, states_of
from runplan.report.memory_table import memory_table
from runplan.report.vllm_share import MARGIN, SAFETY
from runplan.run_spec import RunSpec
from runplan.samplers.native import cached_bytes, row_bytes
from seqpack.memory import names as ledger

LEAST = 0.1
"""Share of the memory that caches get where training leaves less: what does not fit then is told as training's."""
ALONE = 4
"""Rows of the longest sequence that caches have room for, whatever training leaves: one of them may always begin."""


def native_share(spec: RunSpec, memory: float) -> float | None:
    """Return the GiB that each native sampler's caches may take; None where all requests have room, or it is unknown.

    In turn with training (mode sync) a part of the caches stays while training computes, the prefix cache; else all.

    Args:
        spec: the run, which samples by the native engine.
        memory: GiB of a device; on a CPU of the host, for each rank.
    """
    shape = spec.shape
    layers = None if shape is None or spec.grid_problems else split_of(spec, shape)
    if shape is None or layers is None:
        return None
    states = states_of(spec, shape, spec.grid, layers)
    on_cpu, apart = spec.engine.device == "cpu", spec.cluster.rollout.ray_workers
    other = [row for row in memory_table(spec, shape, states) if row.name != ledger.SAMPLER_CACHES]
    own = sum(row.device for row in other if row.name.startswith("sampler"))
    held = sum(row.host for row in other) if on_cpu else 0.0
    if apart:  # on devices of their own, or beside one another on a host
        left = (memory / apart if on_cpu else memory - MARGIN) - own / GIB
    else:
        free = memory - (0.0 if on_cpu else MARGIN) - (own + held) / GIB
        left = free - peak_of(spec, shape, spec.grid, layers, states).bytes / SAFETY / GIB
        if spec.cluster.schedule.mode == "sync":
            left = min(free - states.device / GIB, CACHE_PART * left)
    left = max(LEAST * memory, left, ALONE * row_bytes(spec, shape) / GIB)
    return None if cached_bytes(spec, shape, width_of(spec.engine)) / GIB <= left else round(left, 2)
