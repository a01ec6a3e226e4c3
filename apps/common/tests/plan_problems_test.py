"""Every problem of a configuration is told at once, by the field's name, with what would do; and a run refuses it."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import pytest

from apps.common.cluster import Cluster
from engines import EngineConfig
from runplan.model.model_shape import ModelShape
from runplan.model.origin import Origin
from runplan.report.plan import make_plan
from runplan.report.readiness import refuse_unready
from runplan.run_spec import RunSpec
from runplan.samplers.vllm import ASLEEP

Backend = Literal["fsdp2", "megatron"]
Cases = dict[str, tuple[dict[str, Any], str]]
"""Settings that are wrong, and what is said of them."""

SHAPE = ModelShape(
    "mixture", "qwen3_moe", "here", layers=12, hidden=64, heads=8, kv_heads=4, head_dim=8, vocab=128, experts=12,
    experts_per_token=2, expert_intermediate=32, shared_expert_intermediate=32,
)  # fmt: skip
SPEC = RunSpec(
    "grpo", "large", EngineConfig(device="cuda"), Cluster(), 8, steps=10, rows=8, longest=64, group=4,
    origin=Origin("a script", SHAPE, "rows", 100),
)  # fmt: skip


def changed(spec: RunSpec, change: Mapping[str, Any]) -> RunSpec:
    """The spec with fields of itself, of its engine (`engine.X`), of its model (`shape.X`) or its rollout changed."""
    own = {name: value for name, value in change.items() if "." not in name}
    parts: dict[str, dict[str, Any]] = {part: {} for part in ("engine", "shape", "rollout", "pools")}
    for name, value in change.items():
        part, dot, rest = name.partition(".")
        if dot:
            parts[part][rest] = value
    settings: Any = spec.cluster
    cluster = replace(
        settings,
        rollout=replace(settings.rollout, **parts["rollout"]),
        pools=replace(settings.pools, **parts["pools"]),
    )
    assert spec.origin is not None
    assert spec.origin.shape is not None
    origin = replace(spec.origin, shape=replace(spec.origin.shape, **parts["shape"]))
    return replace(spec, cluster=cluster, origin=origin, engine=replace(spec.engine, **parts["engine"]), **own)


BOTH: Cases = {
    "heads": ({"engine.tensor_parallel": 8, "shape.heads": 12}, r"12 heads do not .* tp = 8: lower tp to a divisor of"),
    "kv heads": ({"engine.tensor_parallel": 8}, r"4 key-value heads do not divide over tp = 8: lower tp to a divisor"),
    "shared expert": (
        {"engine.tensor_parallel": 4, "shape.shared_expert_intermediate": 30},
        r"shared expert .* tp = 4",
    ),
    "ranks": ({"engine.tensor_parallel": 2, "processes": 5}, r"5 ranks are no multiple .*: use 4 or 6 ranks \(--nproc"),
    "stages of ranks": ({"engine.pipeline_parallel": 3}, r"8 ranks .* pp = 3: use 6 or 9 .*--parallel.pipeline"),
    "context": ({"engine.context_parallel": "static:3"}, r"8 ranks .* 1 x 3 x 1 = 3: .*--parallel.context"),
    "experts": (
        {"engine.expert_parallel": 8},
        r"12 experts do not divide over ep = 8: choose ep from the divisors of 12",
    ),
    "expert ranks": (
        {"engine.expert_parallel": 6},
        r"8 ranks of a pipeline stage .* ep x etp .* to one of \[1, 2, 4, 8\]",
    ),
    "expert width": (
        {"engine.expert_tensor_parallel": 8, "shape.expert_intermediate": 30},
        r"experts of width 30 do not divide over etp = 8: lower etp .*--parallel.expert-tensor",
    ),
    "layers": ({"engine.pipeline_parallel": 8}, r"12 layers do not divide over 8 stages: set first_stage_layers"),
    "sizes of stages": (
        {"engine.pipeline_parallel": 2, "engine.first_stage_layers": 5, "engine.last_stage_layers": 6},
        r"first and last stage hold 11 of 12 layers, which leaves 1 for 0 stages: change first_stage_layers",
    ),
    "chunks": (
        {"engine.pipeline_parallel": 2, "engine.virtual_pipeline_parallel": 4},
        r"6 layers does not divide into 4 chunks: lower virtual_pipeline_parallel to a divisor of 6",
    ),
    "length": ({"longest": 20_000}, r"20000 tokens does not fit .* 16384: raise --trainer.max-tokens-per-rank"),
    "mini-batches": ({"mini_batches": 40}, r"32 sequences are too few for 40 mini-batches: lower the latter"),
    "rows": ({"rows": 200}, r"a step takes 200 rows and the data has 100: lower it"),
    "memory": ({"pools.device_memory_gib": 0.0001}, r"do not fit a device of 0.0001 GiB: use more nodes"),
    "sampler's heads": (
        {"rollout.engine": "vllm", "rollout.tp": 16},
        r"8 heads do not divide over rollout tp = 16: lower it \(--rollout.tensor-parallel",
    ),
    "sampler's devices": (
        {"rollout.engine": "vllm", "rollout.tp": 3},
        r"8 sampling devices are no multiple of tp x dp = 3: change --rollout.tensor-parallel",
    ),
    "sampler's length": (
        {"rollout.engine": "vllm", "rollout.max_model_tokens": 32},
        r"accepts 32 tokens, a sequence may have 64: raise --rollout.max-model-tokens",
    ),
}
FSDP2: Cases = {
    "shards": ({"engine.shard_ranks": 3}, r"shard_ranks=3 does not divide the 8 ranks of this run: choose a divisor"),
}
MEGATRON: Cases = {
    "interleaved": (
        {"engine.pipeline_parallel": 4, "engine.virtual_pipeline_parallel": 3, "rows": 7, "group": 1},
        r"no multiple of pp = 4.*virtual_pipeline_parallel 1",
    ),
}
OF_BACKEND: dict[Backend, Cases] = {"fsdp2": BOTH | FSDP2, "megatron": BOTH | MEGATRON}


def problems_of(backend: Backend, *changes: Mapping[str, Any]) -> list[str]:
    """Of the plan; and the run is refused."""
    merged = {name: value for change in changes for name, value in change.items()}
    spec = changed(replace(SPEC, engine=replace(SPEC.engine, backend=backend)), merged)
    with pytest.raises(ValueError, match="can't be run with these settings"):
        refuse_unready(spec)
    plan = make_plan(spec)
    assert [line for line in str(plan).splitlines() if line.startswith("PROBLEM")] == [
        f"PROBLEM   {problem}" for problem in plan.problems
    ]
    return plan.problems


@pytest.mark.parametrize(("backend", "name"), [(b, n) for b, cases in OF_BACKEND.items() for n in cases])
def test_a_wrong_setting_is_named_with_what_would_do(backend: Backend, name: str) -> None:
    change, wanted = OF_BACKEND[backend][name]
    problems = problems_of(backend, change)
    assert [problem for problem in problems if re.search(wanted, problem)], problems
    assert make_plan(SPEC).problems == [], "and nothing is wrong without it"


APART = ("kv heads", "experts", "layers", "length", "mini-batches", "sampler's devices")
"""Neither changes the figures that another tells."""
PAIRS = [
    *itertools.product(OF_BACKEND, itertools.combinations(APART, 2)),
    *itertools.product(OF_BACKEND, [("ranks", "experts"), ("ranks", "length"), ("experts", "expert width")]),
    ("fsdp2", ("shards", "mini-batches")),
    ("fsdp2", ("shards", "layers")),
]


@pytest.mark.parametrize(("backend", "pair"), PAIRS)
def test_two_wrong_settings_are_both_told(backend: Backend, pair: tuple[str, ...]) -> None:
    cases = [OF_BACKEND[backend][name] for name in pair]
    problems = problems_of(backend, *(change for change, _ in cases))
    for _, wanted in cases:
        assert [problem for problem in problems if re.search(wanted, problem)], problems


WIDE: dict[str, Any] = {
    "shape.hidden": 4096,
    "shape.vocab": 100_000,
    "shape.layers": 16,
    "engine.max_tokens_per_rank": 8192,
}
"""A model whose training is some GiB."""


@pytest.mark.parametrize("memory", [30, 80])
@pytest.mark.parametrize(("sleep", "offload"), itertools.product([True, False], repeat=2))
def test_the_turns_of_a_device_that_vllm_shares_are_each_held_against_it(
    memory: int, sleep: bool, offload: bool
) -> None:
    layout: dict[str, Any] = {"rollout.engine": "vllm", "rollout.memory_share": 0.75, "rollout.sleep": sleep}
    spec = changed(SPEC, WIDE | layout | {"pools.device_memory_gib": memory})
    settings: Any = spec.cluster
    plan = make_plan(replace(spec, cluster=replace(settings, offload=offload)))
    (turns,) = [line for line in plan.sections["Pool"] if "turn" in line]
    trains, samples = map(float, re.findall(r" (\d+\.\d) ", turns))
    states, peak = (float(plan.sections["Memory"][place].split()[0]) for place in (0, -1))
    share = 0.75 * memory
    assert trains == pytest.approx(peak + (ASLEEP if sleep else share), abs=0.11)
    assert samples == pytest.approx(share + (0 if offload else states), abs=0.11)
    assert peak < 30 < peak + share
    wanted = []
    if trains >= memory:
        wanted.append("in training's turn.*lower --rollout.gpu-memory-utilization, or set --rollout.sleep")
    if samples >= memory:
        wanted.append("in vLLM's turn.*lower --rollout.gpu-memory-utilization, or set --offload")
    assert len(plan.problems) == len(wanted)
    assert all(re.search(text, problem) for text, problem in zip(wanted, plan.problems, strict=True))
    apart = {"pools.placement": "separate", "pools.rollout_nodes": 1}
    assert not any("turn" in line for line in make_plan(changed(spec, apart)).sections["Pool"])


def test_what_is_not_derived_for_a_problem_is_said() -> None:
    plan = make_plan(changed(SPEC, {"engine.pipeline_parallel": 3}))
    assert plan.sections["Memory"] == ["not derived: the ranks and the layers must divide first, see the problems"]
