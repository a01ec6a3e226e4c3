"""Lines on the time of a step: seconds where a device of its kind was measured, else the operations to divide."""

from engines import EngineConfig
from runplan.estimates.buffers import total_parameters
from runplan.estimates.loading import DISK_BYTES
from runplan.estimates.rates import PEAK, not_measured, rate_of
from runplan.estimates.states import GIB
from runplan.estimates.step_time import StepWork, training_flops, training_seconds
from runplan.estimates.sync_time import NIC, Phase, sync_seconds
from runplan.layout.batches import BatchPlan, bubble_share
from runplan.layout.grid import Grid
from runplan.model.adapters import adapter_parameters, syncs_adapters
from runplan.model.model_shape import ModelShape
from runplan.run_spec import RunSpec
from runplan.samplers.pool_lines import gib

UNIT = 1e15
EXAMPLE = 0.1
"""PFLOPS of the example division."""


def time_lines(spec: RunSpec, shape: ModelShape, grid: Grid, batches: BatchPlan) -> list[str]:
    """Return lines on the time of a step; none for devices that are neither measured nor NPUs."""
    step, device = step_of(spec, grid, batches), spec.engine.device
    all_ranks = training_flops(shape, step) / UNIT
    counted = f"{_short(all_ranks)} PFLOP, {_short(all_ranks / step.ranks)} a rank"
    if device in PEAK:
        lines = _estimated(spec, shape, step, counted)
    elif device == "npu":
        lines = _left_to_divide(shape, step, counted)
    else:
        return []
    tower = "a vision tower, " if spec.engine.vision != "off" else ""
    sampled = "sampling" if spec.app == "grpo" else "reading data"
    if step.counting:
        lines.append(f"of which {step.counting:.2f} forward passes, without the head, count for the router's loss")
    lines += [sync_line(spec, shape)] * (spec.app == "grpo")
    return [*lines, f"not counted: {tower}communication, offloading, {sampled}"]


def sync_line(spec: RunSpec, shape: ModelShape) -> str:
    """Return what a weight sync moves, and its seconds where a way of its kind was measured."""
    steps = spec.cluster.schedule.parameter_sync_step
    often = "each optimizer step" if steps == 1 and spec.mini_batches * spec.epochs == 1 else "each sync"
    if spec.cluster.sampler.shares_weights(spec):
        return "weight sync: nothing is copied"
    size, what = float(DISK_BYTES * total_parameters(shape)), "weights"
    if syncs_adapters(spec.engine.lora):
        size, what = 4.0 * adapter_parameters(shape, spec.engine.lora), "adapters"
    moved = f"weight sync: {gib(size)} of {what} to each sampler, {often}"
    rate = spec.cluster.sampler.sync_rate(spec)
    if spec.cluster.schedule.weight_sync == "shards":
        straight = _straight(spec)
        where = f"{spec.cluster.rollout.ray_workers} samplers" if straight else f"{_takers(spec)} of {spec.ranks} ranks"
        moved = f"{moved}, shard to shard to {where} in {_seconds(_shards(spec, size))} s"
        moved += f" where each has {NIC / 125e6:.0f} Gb/s"
        if straight:
            return moved
        if _takers(spec) == spec.ranks // _ranks_of_sampler(spec):
            return moved
        moved += ", and on to its samplers"
    return f"{moved}: {_seconds(rate.seconds * size / GIB)} s {rate.way}" if rate else f"{moved}; not timed"


def _ranks_of_sampler(spec: RunSpec) -> int:
    return min(spec.ranks, spec.cluster.rollout.tp)


def _takers(spec: RunSpec) -> int:
    """Return how many ranks take the weights: the first alone, or each that has a sampler."""
    first = spec.cluster.rollout.ray_workers or spec.cluster.schedule.mode == "fully_async"
    return 1 if first else spec.ranks // _ranks_of_sampler(spec)


def _straight(spec: RunSpec) -> bool:
    """Return whether ranks send their shards to Ray's samplers themselves."""
    return bool(spec.cluster.rollout.ray_workers) and spec.cluster.rollout.weight_transport != "objects"


def _shards(spec: RunSpec, size: float) -> float:
    """Return the seconds in which each of them takes from all others what it lacks."""
    if _straight(spec):
        return sync_seconds([Phase.of_shards(size, spec.ranks, spec.cluster.rollout.ray_workers, 1)], NIC)
    phase = Phase.of_shards(size * (spec.ranks - 1) / spec.ranks, spec.ranks, _takers(spec), 1)
    return sync_seconds([phase], NIC)


def step_of(spec: RunSpec, grid: Grid, batches: BatchPlan) -> StepWork:
    """Return the work of the run's step, were all sequences at full length."""
    again = spec.app == "grpo" and spec.mini_batches * spec.epochs > 1
    scored = again and spec.mini_batches == 1  # that pass counts for the first update, if it is of the whole batch
    return StepWork(
        sequences=batches.sequences,
        length=spec.longest,
        ranks=spec.ranks,
        epochs=spec.epochs,
        forwards=again + spec.reference_policy,
        recompute=spec.engine.gradient_checkpointing,
        stages=grid.pp,
        chunks=spec.engine.virtual_pipeline_parallel,
        micro_batches=min(batches.micro_batches),
        counting=(spec.epochs - scored) * _counted_share(spec.engine, min(batches.micro_batches)),
    )


def _counted_share(engine: EngineConfig, micro_batches: int) -> float:
    """Return the share of a step's micro-batches that a pass counts for the router's balancing loss.

    One is spared, and those that run ahead; under FSDP2 all where their experts are given or only the z-loss is asked
    for (`engines.scoring.router_counts`). Megatron's stages count all.
    """
    megatron = engine.backend == "megatron"
    if not (engine.router_aux_loss_coef or (megatron and engine.router_z_loss_coef)):
        return 0.0
    if engine.pipeline_parallel > 1:
        return 1.0
    if engine.routing_replay and not megatron:
        return 0.0
    return max(0.0, 1 - (1 + (engine.router_forwards_ahead or 0)) / micro_batches)


def _estimated(spec: RunSpec, shape: ModelShape, step: StepWork, counted: str) -> list[str]:
    peak, rate = PEAK[spec.engine.device], rate_of(shape, spec.engine, spec.ranks)
    seconds = training_seconds(shape, step, peak * rate.share)
    lines = [
        f"{seconds:.0f} s of training's arithmetic a step, were all sequences at full length ({counted})",
        f"at {rate.share:.0%} of {peak / 1e12:.0f} TFLOPS a device, {rate}",
    ]
    apart = not_measured(shape, spec.engine)
    return [*lines, f"no row was measured with {', '.join(apart)}"] if apart else lines


def _left_to_divide(shape: ModelShape, step: StepWork, counted: str) -> list[str]:
    """Return the operations of a step on NPUs, which were not measured, and how to divide them by a known rate."""
    each = training_flops(shape, step) / UNIT / step.ranks
    works = 1 - bubble_share(step.micro_batches, step.stages, step.chunks)
    waiting = f" / {works:.2f}, as stages wait for one another" if step.stages > 1 else ""
    seconds = training_seconds(shape, step, EXAMPLE * UNIT)
    return [
        f"{counted}: training's arithmetic of a step, were all sequences at full length",
        f"seconds = {_short(each)} / the PFLOPS that your devices reach{waiting}; no NPU was measured here",
        f"if it were {EXAMPLE:g} PFLOPS: {seconds:.0f} s",
    ]


def _seconds(number: float) -> str:
    """Return the number as text with two digits or more."""
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _short(number: float) -> str:
    """Return the number as text with at least three digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
