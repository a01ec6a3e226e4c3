"""Share of a GPU that vLLM takes beside training, by the plan of both."""

import math

from runplan.estimates.buffers import cache_bytes, state_bytes
from runplan.estimates.states import GIB
from runplan.report.memory_lines import peak_of, split_of, states_of
from runplan.report.memory_table import reference_bytes
from runplan.run_spec import RunSpec
from runplan.samplers.vllm import stage_share, vllm_weights

MARGIN = 4.0
"""GiB of training's context, libraries and torn memory that no estimate counts."""
BESIDE = 1.7
"""GiB that a vLLM takes beside its share, for its context and graphs: 1.6 on an H200 (vLLM 0.26)."""
SAFETY = 0.8
"""Share that an estimate may be of what training takes: of the peak it was 0.92 at least on an H200, and an allocator
takes more than is in use."""
WORK = 6.0
"""GiB of a vLLM's activations, logits and graphs."""
MOST = 0.9
"""vLLM's own default."""


def vllm_share(spec: RunSpec, memory: float, requests: int) -> float:
    """Return the share of a GPU that each vLLM may take: what training leaves, and no more than its requests need.

    Args:
        spec: the run, in which vLLM and training share their devices.
        memory: GiB of a device.
        requests: most requests that decode together.

    Returns 0 where the sizes of the model, or how it is split, are unknown: the plan says why.
    """
    shape, layout = spec.shape, spec.cluster.rollout
    layers = None if shape is None or spec.grid_problems else split_of(spec, shape)
    if shape is None or layers is None:
        return 0.0
    states = states_of(spec, shape, spec.grid, layers)
    trains = peak_of(spec, shape, spec.grid, layers, states).bytes / SAFETY
    if layout.sleep:
        trains = reference_bytes(spec, shape, states) + (0.0 if spec.cluster.offload else states.device)
    staged = sum(buffer.device for buffer in spec.cluster.sampler.buffers(shape, layout, 2))
    each = vllm_weights(shape, layout) + requests * (
        spec.longest * cache_bytes(shape, layout.tp) + state_bytes(shape, layout.tp)
    ) * stage_share(shape, layout)
    left = (memory - MARGIN - (trains + staged) / GIB) / layout.copies_per_device - BESIDE
    share = min(MOST / layout.copies_per_device, left / memory, (each / GIB + WORK) / memory)
    return max(0.01, math.floor(100 * share) / 100)
