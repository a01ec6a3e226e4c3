"""What a plan says of a step's time: seconds at a measured share, or operations to divide by somebody's own rate."""

import re
from dataclasses import replace
from typing import Any

import pytest

from engines import EngineConfig
from runplan.estimates.buffers import total_parameters
from runplan.estimates.rates import EXPERTS
from runplan.estimates.step_time import StepWork, training_flops
from runplan.layout.batches import plan_batches
from runplan.model.model_shape import ModelShape
from runplan.plain_settings import PlainCluster, PlainRollout, PlainSchedule
from runplan.report.time_lines import step_of, time_lines
from runplan.run_spec import RunSpec

SHAPE = ModelShape(
    "hybrid", "qwen3_5_moe_text", "here", layers=12, hidden=2048, heads=8, kv_heads=2, head_dim=256, vocab=65_536,
    experts=16, experts_per_token=2, expert_intermediate=1024, full_attention_interval=4, linear_key_heads=16,
    linear_value_heads=32,
)  # fmt: skip
SPEC = RunSpec("sft", "any", EngineConfig(device="cuda"), PlainCluster(), 8, steps=10, rows=1024, longest=4096)


def lines_of(spec: RunSpec) -> tuple[list[str], StepWork]:
    batches = plan_batches(spec.rows, 1, spec.grid.dp, spec.longest, spec.engine.max_tokens_per_rank)
    return time_lines(spec, SHAPE, spec.grid, batches), step_of(spec, spec.grid, batches)


def test_seconds_are_operations_at_the_share_of_the_row_that_is_named() -> None:
    lines, step = lines_of(SPEC)
    each = training_flops(SHAPE, step) / 8
    assert lines[0].startswith(f"{each / (EXPERTS.share * 989e12):.0f} s of training's arithmetic a step")
    assert f"PFLOP, {each / 1e15:.3g} a rank)" in lines[0]
    assert lines[1].startswith("at 20% of 989 TFLOPS a device, as a 1.0B hybrid with 16 experts")
    assert len(lines) == 3, "nothing is unlike the row"
    under, _ = lines_of(replace(SPEC, engine=EngineConfig(device="cuda", backend="megatron")))
    assert under[2] == "no row was measured with experts under Megatron"


def test_on_npus_a_step_is_counted_and_the_division_is_written_down() -> None:
    lines, step = lines_of(replace(SPEC, engine=EngineConfig(device="npu")))
    each = training_flops(SHAPE, step) / 8 / 1e15
    assert lines[0].startswith(f"{each * 8:.3g} PFLOP, {each:.3g} a rank")
    assert lines[1] == f"seconds = {each:.3g} / the PFLOPS that your devices reach; no NPU was measured here"
    assert lines[2] == f"if it were 0.1 PFLOPS: {each / 0.1:.0f} s"
    assert not any(" s of training" in line or "%" in line for line in lines), "no share of ours is an NPU's"


def test_waiting_stages_are_part_of_the_division() -> None:
    """4 stages and 256 micro-batches on 2 ranks of data each: 3 of 259 turns are waited for."""
    piped = EngineConfig(device="npu", backend="megatron", pipeline_parallel=4, max_tokens_per_rank=8192)
    lines, step = lines_of(replace(SPEC, engine=piped))
    assert (step.stages, step.micro_batches) == (4, 256)
    works = 256 / 259
    assert f" / {works:.2f}, as stages wait for one another;" in lines[1]
    each = training_flops(SHAPE, step) / 8 / 1e15
    (seconds,) = re.findall(r": ([0-9.]+) s", lines[2])
    assert float(seconds) == pytest.approx(each / 0.1 / works, abs=0.5)


def test_a_cpu_has_no_lines_and_a_tower_is_not_counted() -> None:
    assert lines_of(replace(SPEC, engine=EngineConfig(device="cpu")))[0] == []
    seeing = replace(SPEC, engine=EngineConfig(device="cuda", vision="frozen"))
    assert lines_of(seeing)[0][-1].startswith("not counted: a vision tower, ")
    assert "tower" not in lines_of(SPEC)[0][-1]


def test_the_pass_of_a_routers_loss_is_counted() -> None:
    """One micro-batch is spared, FSDP2's all with the experts given; under Megatron's stages none."""
    losses = EngineConfig(device="cuda", router_aux_loss_coef=0.01, max_tokens_per_rank=8192)
    lines, step = lines_of(replace(SPEC, engine=losses))
    share = 1 - 1 / step.micro_batches
    assert step.counting == share
    assert any(line.startswith(f"of which {share:.2f} forward passes, without the head") for line in lines)
    without = replace(step, counting=0.0)
    head = 2.0 * SHAPE.hidden * SHAPE.vocab * SPEC.longest
    forward = (training_flops(SHAPE, without) / SPEC.rows) / 3
    extra = (training_flops(SHAPE, step) - training_flops(SHAPE, without)) / SPEC.rows
    assert extra == pytest.approx(share * (forward - head), rel=1e-6)
    for engine, expected in (
        (replace(losses, routing_replay=True), 0.0),
        (replace(losses, router_forwards_ahead=1), 1 - 2 / step.micro_batches),
        (replace(losses, router_forwards_ahead=10_000), 0.0),
        (replace(losses, router_aux_loss_coef=0.0, router_z_loss_coef=0.1), 0.0),
        (replace(losses, backend="megatron"), share),
        (replace(losses, backend="megatron", router_forwards_ahead=1, routing_replay=True), 1 - 2 / step.micro_batches),
        (replace(losses, backend="megatron", pipeline_parallel=2), 1.0),
        (replace(losses, backend="megatron", router_aux_loss_coef=0.0, router_z_loss_coef=0.1), share),
    ):
        assert lines_of(replace(SPEC, engine=engine))[1].counting == expected


def said_seconds(number: float) -> str:
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"


def test_a_weight_sync_has_a_line() -> None:
    """None where weights are shared, and each way that they take at its measured rate."""
    run = replace(SPEC, app="grpo")

    def said(spec: RunSpec) -> str:
        return next(line for line in lines_of(spec)[0] if line.startswith("weight sync"))

    assert said(replace(run, processes=1)) == "weight sync: nothing is copied"
    size = 2 * total_parameters(SHAPE) / 2**30
    vllm = replace(run, cluster=PlainCluster(rollout=PlainRollout(engine="vllm"), apart="a process of its own"))
    ways = [(run, 0.075, "on the device"), (vllm, 0.266, "through host memory")]
    changes: list[tuple[dict[str, Any], float, str]] = [
        ({"dp": 4}, 0.373, "through host memory"),
        ({"weights_on_device": True}, 0.075, "on the device"),
        ({"weights_on_device": True, "dp": 2}, 0.124, "on the device"),
    ]
    for change, seconds, place in changes:
        rollout = PlainRollout(engine="vllm", **change)
        ways.append((replace(vllm, cluster=PlainCluster(rollout=rollout, apart="elsewhere")), seconds, place))
    for spec, seconds, place in ways:
        assert f"each optimizer step: {said_seconds(size / 1.248 * seconds)} s {place}" in said(spec)
    own = PlainRollout(engine="mine.py:Sampler")
    assert said(replace(run, cluster=PlainCluster(rollout=own, apart="elsewhere"))).endswith("; not timed")
    for transport, name, rate in (("auto", "objects", 2.41), ("nccl", "nccl", 0.098)):
        rollout = PlainRollout(ray_workers=2, weight_transport=transport)
        ray = replace(run, cluster=PlainCluster(rollout=rollout, apart="in actors"))
        assert f": {said_seconds(size * rate)} s by {name}, at the rate" in said(ray)
    assert not any(line.startswith("weight sync") for line in lines_of(SPEC)[0])


def test_a_weight_sync_shard_to_shard_is_timed_by_its_links() -> None:
    """To a sampler of each rank, to Ray's samplers, or to the first rank and by the measured way on from there."""
    size, link = 2 * total_parameters(SHAPE), 0.9 * 50e9
    schedule = PlainSchedule(weight_sync="shards")

    def said(rollout: PlainRollout, schedule: PlainSchedule = schedule) -> str:
        cluster = PlainCluster(rollout=rollout, schedule=schedule, apart="a process of its own")
        lines, _ = lines_of(replace(SPEC, app="grpo", processes=8, cluster=cluster))
        return next(line for line in lines if line.startswith("weight sync"))

    each = said_seconds(size * 7 / 8 / link)  # seven eighths come in, and as many go out
    assert said(PlainRollout(engine="vllm")).endswith(f"to 8 of 8 ranks in {each} s where each has 400 Gb/s")
    assert f"to 4 of 8 ranks in {each} s" in said(PlainRollout(engine="vllm", tp=2))
    whole = said_seconds(size / link)  # a sampler takes all of it
    assert said(PlainRollout(ray_workers=2)).endswith(f"to 2 samplers in {whole} s where each has 400 Gb/s")
    assert f"to 16 samplers in {said_seconds(2 * size / link)} s" in said(PlainRollout(ray_workers=16))
    ray = said(PlainRollout(ray_workers=2, weight_transport="objects"))
    assert f"to 1 of 8 ranks in {each} s where each has 400 Gb/s, and on to its samplers: " in ray
    assert "by objects" in ray
    asynchronous = said(PlainRollout(engine="vllm"), replace(schedule, mode="fully_async"))
    assert "to 1 of 8 ranks" in asynchronous


@pytest.mark.parametrize(("mini_batches", "passes"), [(1, 2), (2, 3)])
def test_the_pass_that_scores_a_whole_batch_counts_for_its_first_update(mini_batches: int, passes: int) -> None:
    engine = EngineConfig(device="cuda", backend="megatron", pipeline_parallel=2, router_aux_loss_coef=0.01)
    spec = replace(SPEC, app="grpo", engine=engine, epochs=3, mini_batches=mini_batches)
    batches = plan_batches(spec.rows, mini_batches, spec.grid.dp, spec.longest, engine.max_tokens_per_rank)
    assert step_of(spec, spec.grid, batches).counting == passes
