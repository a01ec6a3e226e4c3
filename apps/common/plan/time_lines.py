"""Lines on the time of a step: seconds where a device of its kind was measured, else the operations to divide."""

from apps.common.plan.batches import BatchPlan, bubble_share
from apps.common.plan.grid import Grid
from apps.common.plan.model_shape import ModelShape
from apps.common.plan.rates import PEAK, rate_of, unlike
from apps.common.plan.step_time import StepWork, training_flops, training_seconds
from apps.common.plan.work import Work

PETA = 1e15
EXAMPLE = 0.1
"""PFLOPS, to show the division by."""


def time_lines(work: Work, shape: ModelShape, grid: Grid, batches: BatchPlan) -> list[str]:
    """Return no lines for devices that are neither measured nor NPUs."""
    step, device = step_of(work, grid, batches), work.engine.device
    all_ranks = training_flops(shape, step) / PETA
    counted = f"{_short(all_ranks)} PFLOP, {_short(all_ranks / step.ranks)} a rank"
    if device in PEAK:
        lines = _estimated(work, shape, step, counted)
    elif device == "npu":
        lines = _left_to_divide(shape, step, counted)
    else:
        return []
    tower = "a vision tower, " if work.engine.vision != "off" else ""
    sampled = "sampling, the hand-over of weights" if work.app == "grpo" else "reading data"
    return [*lines, f"not counted: {tower}communication, offloading, {sampled}"]


def step_of(work: Work, grid: Grid, batches: BatchPlan) -> StepWork:
    """Return what a step of the run computes, were all sequences at full length."""
    again = work.app == "grpo" and work.mini_batches * work.epochs > 1
    return StepWork(
        sequences=batches.sequences,
        length=work.longest,
        ranks=work.ranks,
        epochs=work.epochs,
        forwards=again + work.reference_policy,
        recompute=work.engine.gradient_checkpointing,
        stages=grid.pp,
        chunks=work.engine.virtual_pipeline_parallel,
        micro_batches=min(batches.micro_batches),
    )


def _estimated(work: Work, shape: ModelShape, step: StepWork, counted: str) -> list[str]:
    peak, rate = PEAK[work.engine.device], rate_of(shape, work.engine, work.ranks)
    seconds = training_seconds(shape, step, peak * rate.share)
    lines = [
        f"{seconds:.0f} s of training's arithmetic a step, were all sequences at full length ({counted})",
        f"at {rate.share:.0%} of {peak / 1e12:.0f} TFLOPS a device, {rate}",
    ]
    apart = unlike(shape, work.engine)
    return [*lines, f"no row was measured with {', '.join(apart)}"] if apart else lines


def _left_to_divide(shape: ModelShape, step: StepWork, counted: str) -> list[str]:
    """Return nothing was measured on an NPU: a step's operations, and what to do with a rate that somebody measured."""
    each = training_flops(shape, step) / PETA / step.ranks
    works = 1 - bubble_share(step.micro_batches, step.stages, step.chunks)
    waiting = f" / {works:.2f}, as stages wait for one another" if step.stages > 1 else ""
    seconds = training_seconds(shape, step, EXAMPLE * PETA)
    return [
        f"{counted}: training's arithmetic of a step, were all sequences at full length",
        f"seconds = {_short(each)} / the PFLOPS that your devices reach{waiting}; no NPU was measured here",
        f"if it were {EXAMPLE:g} PFLOPS: {seconds:.0f} s",
    ]


def _short(number: float) -> str:
    """Return at least three digits."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
