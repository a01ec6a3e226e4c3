"""Micro-batches whose forward pass runs ahead for a router's balancing loss: as many as a plan finds memory for.

That loss needs the counts of all micro-batches before the first backward pass (`engines.scoring.router_counts`).
Forward passes that run ahead give them, and each keeps its activations; a pass without gradients counts what is left.
"""

from bisect import bisect_left
from dataclasses import replace

from runplan.estimates.peak_memory import kept_bytes
from runplan.estimates.states import GIB, width_of
from runplan.model.model_shape import ModelShape
from runplan.report.memory_lines import memory_lines
from runplan.run_spec import RunSpec
from runplan.samplers.pool_lines import gib

MARGIN = 0.9
"""Share of a device that a plan may fill: its peak is within a tenth of what allocators counted."""


def asks_for_counts(spec: RunSpec) -> bool:
    """Return whether a step needs counts of a router that nothing but forward passes says, and may choose how."""
    engine, shape = spec.engine, spec.shape
    if shape is None or not shape.experts or engine.pipeline_parallel > 1:
        return False
    if engine.routing_replay and engine.backend == "fsdp2":
        return False
    coefficient = engine.router_aux_loss_coef
    return spec.balancing_loss if coefficient is None else coefficient > 0


def with_forwards_ahead(spec: RunSpec, device_memory: float | None = None) -> RunSpec:
    """Return the run with the number of forward passes that run ahead, where its settings leave that open: the largest
    for which the memory of the plan, with the sampler's, has no problem.

    Args:
        spec: the run.
        device_memory: the GiB of this machine's device, where the settings do not name it.
    """
    memory = spec.cluster.pools.device_memory_gib or device_memory
    shape, engine = spec.shape, spec.engine
    if engine.router_forwards_ahead is not None or memory is None or not asks_for_counts(spec):
        return spec
    if shape is None or spec.grid_problems:
        return spec
    grid, room = spec.grid, replace(spec, usable_gib=MARGIN * memory - _sampler_gib(spec, shape))

    def with_ahead(run: RunSpec, ahead: int) -> RunSpec:
        return replace(run, engine=replace(engine, router_forwards_ahead=ahead))

    def too_much(ahead: int) -> bool:
        return bool(memory_lines(with_ahead(room, ahead), shape, grid, [shape.layers])[1])

    try:
        most = max(spec.batches(grid).micro_batches) - 1
    except ValueError:  # a plan says why
        return spec
    return with_ahead(spec, bisect_left(range(1, most + 1), True, key=too_much))


def _sampler_gib(spec: RunSpec, shape: ModelShape) -> float:
    """Return the GiB that a sampler in the training processes keeps on their devices."""
    if spec.app != "grpo" or spec.cluster.pools.placement == "separate":
        return 0.0
    on_cpu = spec.engine.device == "cpu"
    return sum(row.device + row.host * on_cpu for row in spec.cluster.sampler.held(spec, shape)) / GIB


def ahead_line(spec: RunSpec, shape: ModelShape, micro_batches: int) -> str | None:
    """Return what runs ahead in a step of so many micro-batches, and what it keeps; None where nothing needs to."""
    if not asks_for_counts(spec):
        return None
    engine, others = spec.engine, micro_batches - 1
    each = gib(kept_bytes(shape, engine, engine.max_tokens_per_rank, width_of(engine)))
    if engine.router_forwards_ahead is None:
        return (
            f"the router's loss runs as many of {others} other micro-batches ahead as fit the device, {each} each: "
            "--pools.device-memory-gib says how many"
        )
    ahead = min(engine.router_forwards_ahead, others)
    line = f"the router's loss runs {ahead} of {others} other micro-batches ahead, {each} each"
    return line if ahead == others else f"{line}, and a pass without gradients counts the others"
