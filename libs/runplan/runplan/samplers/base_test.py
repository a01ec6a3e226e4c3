"""A sampler of your own in a plan: unknown until it states its memory, its requirements and its packages."""

from dataclasses import replace

from engines import EngineConfig
from engines.capability import Supported, Unsupported
from runplan import Origin, PlainCluster, PlainRollout, RunSpec, make_plan
from runplan.checks.machine import seen_here
from runplan.estimates.buffers import Buffer
from runplan.model.model_shape import ModelShape
from runplan.samplers.base import SamplerPlan
from runplan.settings import RolloutSettings

SHAPE = ModelShape(
    "dense", "qwen3", "here", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, vocab=128, intermediate=128
)
ROLLOUT = PlainRollout(engine="mine.py:Backend", tp=2)
SPEC = RunSpec(
    "grpo", "any", EngineConfig(device="cpu"), PlainCluster(rollout=ROLLOUT, apart="elsewhere"), 2, 1, 2, 8,
    origin=Origin("a script", SHAPE, "rows"),
)  # fmt: skip


class OwnPlan(SamplerPlan):
    def buffers(self, shape: ModelShape, layout: RolloutSettings, width: int) -> list[Buffer]:
        return [Buffer("weights and caches", device=2.0**30 * layout.tp, host=2.0**29 * width, always=True)]

    def requirements(self, spec: RunSpec) -> dict[str, Supported | Unsupported]:
        return {"a server": Unsupported(f"none is there for {spec.longest} tokens: start one")}

    def seen_here(self, spec: RunSpec) -> list[str]:
        return [f"missing: a server for {spec.recipe}"]


def test_nothing_is_known_of_a_sampler_that_states_nothing() -> None:
    plan = make_plan(SPEC)
    assert plan.sections["Pool"] == ["a sampler of its own: not planned"]
    assert plan.ready
    assert seen_here(SPEC, {}) == []


def test_what_a_sampler_states_is_in_the_plan() -> None:
    cluster = PlainCluster(rollout=ROLLOUT, own_sampler=OwnPlan())
    spec = replace(SPEC, cluster=cluster)
    plan = make_plan(spec)
    assert plan.sections["Pool"] == [
        "weights and caches of each sampler: 2.0 GiB on the device and 2.0 GiB on the host"
    ]
    assert "MISSING   a server: No(none is there for 8 tokens: start one)" in str(plan)
    assert seen_here(spec, {}) == ["missing: a server for any"]
    trained_alone = make_plan(replace(spec, app="sft"))
    assert "Pool" not in trained_alone.sections
    assert trained_alone.ready
