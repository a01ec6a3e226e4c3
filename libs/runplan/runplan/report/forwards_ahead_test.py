"""How many forward passes run ahead: as many as a plan of memory takes, and one more is too much."""

from dataclasses import replace

from engines import EngineConfig
from runplan.checks.machine import device_memory_gib
from runplan.estimates.peak_memory import peak_memory
from runplan.model.model_shape import ModelShape
from runplan.model.origin import Origin
from runplan.plain_settings import PlainCluster, PlainPools, PlainRollout
from runplan.report.forwards_ahead import MARGIN, with_forwards_ahead
from runplan.report.plan import make_plan
from runplan.run_spec import RunSpec

SHAPE = ModelShape(
    "mixture", "qwen3_moe", "here", layers=12, hidden=2048, heads=8, kv_heads=2, head_dim=256, vocab=65_536,
    experts=16, experts_per_token=2, expert_intermediate=1024,
)  # fmt: skip
ENGINE = EngineConfig(device="cuda", router_aux_loss_coef=0.01, max_tokens_per_rank=8192)
SPEC = RunSpec(
    *("sft", "any", ENGINE, PlainCluster(), 8, 10, 192, 4096),
    origin=Origin("mine.sh", SHAPE, "rows"),
)
"""12 micro-batches of a rank."""


def ahead(spec: RunSpec, memory: float | None = None) -> int | None:
    return with_forwards_ahead(spec, memory).engine.router_forwards_ahead


def peak_gib(spec: RunSpec, count: int) -> float:
    engine = replace(spec.engine, router_forwards_ahead=count)
    return peak_memory(SHAPE, engine, spec.grid, [SHAPE.layers], spec.shards).bytes / 2**30


def test_the_largest_number_whose_peak_fits_is_taken() -> None:
    counts = [ahead(SPEC, memory) for memory in range(4, 400, 8)]
    assert counts[0] == 0
    assert counts[-1] == 11, "all but the first"
    assert set(counts) > {0, 1, 2, 5, 11}
    for memory, count in zip(range(4, 400, 8), counts, strict=True):
        assert count is not None
        assert count == 0 or peak_gib(SPEC, count) < MARGIN * memory
        assert count == 11 or peak_gib(SPEC, count + 1) >= MARGIN * memory
    named = replace(SPEC, cluster=PlainCluster(pools=PlainPools(device_memory_gib=180)))
    assert ahead(named, 4.0) == ahead(SPEC, 180.0), "what the settings name comes first"


def test_recomputed_layers_leave_memory_for_all() -> None:
    kept = ahead(SPEC, 40.0)
    assert kept is not None
    assert 0 < kept < 11
    assert ahead(replace(SPEC, engine=replace(ENGINE, gradient_checkpointing=True)), 40.0) == 11


def test_what_a_sampler_keeps_is_left_free() -> None:
    run = replace(SPEC, app="grpo", rows=64, group=3)
    alone = replace(run, cluster=PlainCluster(pools=PlainPools(placement="separate", rollout_nodes=1)))
    for engine in ("native", "vllm"):
        beside = replace(run, cluster=PlainCluster(rollout=PlainRollout(engine=engine, memory_share=0.6), apart="so"))
        ours, theirs = (ahead(one, 64.0) for one in (beside, alone))
        assert ours is not None
        assert theirs is not None
        assert ours < theirs


def test_settings_are_kept_and_nothing_runs_ahead_for_nothing() -> None:
    for changes in (
        {"router_forwards_ahead": 3},
        {"backend": "megatron", "pipeline_parallel": 2},
        {"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.1},
        {"router_aux_loss_coef": None},
        {"routing_replay": True},
    ):
        spec = replace(SPEC, engine=replace(ENGINE, **changes))
        assert with_forwards_ahead(spec, 400.0) == spec, changes
    own = replace(SPEC, engine=replace(ENGINE, router_aux_loss_coef=None), balancing_loss=True)
    assert ahead(own, 400.0) == 11, "the model's own coefficient"
    assert ahead(SPEC) is None, "no device is known"
    assert ahead(replace(SPEC, longest=100_000), 80.0) is None, "no batch can be planned"


def test_a_plan_says_what_runs_ahead() -> None:
    def memory(spec: RunSpec) -> str:
        plan = make_plan(spec)
        return "\n".join(plan.sections["Memory"] + plan.sections["Time"])

    assert "runs as many of 11 other micro-batches ahead as fit the device" in memory(SPEC)
    known = replace(SPEC, cluster=PlainCluster(pools=PlainPools(device_memory_gib=48)))
    few = ahead(known)
    assert few is not None
    assert 0 < few < 11
    assert f"runs {few} of 11 other micro-batches ahead" in memory(known)
    assert f"of which {1 - (1 + few) / 12:.2f} forward passes, without the head, count" in memory(known)
    much = memory(replace(known, engine=replace(ENGINE, gradient_checkpointing=True)))
    assert "runs 11 of 11 other micro-batches ahead" in much
    assert "count" not in much.replace("not counted", "")
    dense = replace(SHAPE, experts=0, experts_per_token=0, expert_intermediate=0, intermediate=1024)
    plain = replace(SPEC, engine=EngineConfig(device="cuda"), origin=Origin("mine.sh", dense, "rows"))
    assert "ahead" not in memory(plain)


def test_the_memory_of_this_machine() -> None:
    one, two = (device_memory_gib(replace(SPEC, engine=EngineConfig(device="cpu"), processes=n)) for n in (1, 2))
    assert one is not None
    assert two == one / 2
