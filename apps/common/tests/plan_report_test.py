"""Problems come with a fix, requirements with an answer, and nothing of the cluster is ever ignored by a run."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.common.cli.environment import refuse_unset
from apps.common.cli.flags import flag as flag_of
from apps.common.cluster import Cluster, Media, Pools, RolloutLayout
from engines import EngineConfig
from runplan.model.model_shape import ModelShape
from runplan.model.origin import Origin, model_type
from runplan.report.plan import Plan, make_plan
from runplan.report.readiness import refuse_unready
from runplan.report.recipe_table import recipe_table
from runplan.run_spec import RunSpec
from schedules.config import Mode, ScheduleConfig

App = Literal["grpo", "sft"]
Backend = Literal["fsdp2", "megatron"]

SHAPE = ModelShape(
    "mixture", "qwen3_moe", "here", layers=12, hidden=64, heads=8, kv_heads=2, head_dim=8, vocab=128, experts=16,
    experts_per_token=2, expert_intermediate=32,
)  # fmt: skip
UNKNOWN = replace(SHAPE, model_type="perceptron")
ORIGIN = Origin("a script", SHAPE, "rows", 100)
PLAIN = RunSpec("grpo", "plain", EngineConfig(device="cpu"), Cluster(), 1, steps=10, rows=8, longest=64, group=4)
LARGE = replace(
    PLAIN, recipe="large", engine=EngineConfig(backend="megatron", device="cuda"), processes=8, origin=ORIGIN
)
HYBRID = replace(LARGE, engine=EngineConfig(device="cuda", shard_ranks=4), cluster=Cluster(pools=Pools(nodes=2)))


def with_layout(spec: RunSpec, **sizes: int) -> RunSpec:
    names = {"tp": "tensor", "pp": "pipeline", "vpp": "virtual_pipeline", "ep": "expert", "etp": "expert_tensor"}
    changes: dict[str, Any] = {f"{names[name]}_parallel": n for name, n in sizes.items()}
    return replace(spec, engine=replace(spec.engine, **changes))


def test_a_plain_run_is_ready_and_not_refused() -> None:
    assert make_plan(PLAIN).ready
    refuse_unready(PLAIN)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (with_layout(LARGE, tp=3), r"8 ranks are no multiple .* use 6 or 9 ranks"),
        (with_layout(LARGE, tp=8), r"2 key-value heads do not divide over tp = 8: lower tp"),
        (with_layout(LARGE, pp=8), r"12 layers do not divide over 8 stages: set first_stage_layers"),
        (with_layout(LARGE, ep=5), r"lower ep to one of"),
        (replace(with_layout(LARGE, ep=3), processes=3), r"16 experts do not divide over ep = 3"),
        (
            with_layout(replace(LARGE, rows=7, group=1), pp=4, vpp=3),
            r"no multiple of pp = 4.*virtual_pipeline_parallel 1",
        ),
        (replace(LARGE, longest=20_000), r"does not fit a micro-batch of 16384: raise --trainer.max-tokens-per-rank"),
        (replace(LARGE, mini_batches=40), r"32 sequences are too few for 40 mini-batches"),
        (replace(LARGE, rows=200), r"a step takes 200 rows and the data has 100"),
        (
            replace(LARGE, cluster=Cluster(rollout=RolloutLayout("vllm", tp=3))),
            r"8 sampling devices are no multiple .*change --rollout.tensor-parallel",
        ),
        (
            replace(LARGE, processes=16, cluster=Cluster(rollout=RolloutLayout("vllm", tp=16))),
            r"8 heads do not divide over rollout tp = 16: lower it",
        ),
        (
            replace(LARGE, cluster=Cluster(rollout=RolloutLayout("vllm", max_model_tokens=32))),
            r"accepts 32 tokens, a sequence may have 64: raise --rollout.max-model-tokens",
        ),
        (
            replace(LARGE, cluster=Cluster(pools=Pools(device_memory_gib=0.001))),
            r"do not fit a device of 0.001 GiB: use more nodes, or --trainer.optimizer-on-host",
        ),
        (
            replace(HYBRID, cluster=Cluster(pools=Pools(nodes=2, device_memory_gib=0.001))),
            r"do not fit a device of 0.001 GiB: raise --parallel.shard-ranks, or --trainer.optimizer-on-host",
        ),
        (replace(HYBRID, processes=5), r"shard_ranks=4 does not divide the 10 ranks of this run: choose a divisor"),
    ],
)
def test_a_problem_is_told_with_its_fix_and_refused_when_run(spec: RunSpec, problem: str) -> None:
    plan = make_plan(spec)
    assert any(re.search(problem, text) for text in plan.problems), plan.problems
    assert "PROBLEM" in str(plan)
    with pytest.raises(ValueError, match="can't be run with these settings"):
        refuse_unready(spec)


def test_copies_of_the_weights_take_the_memory_of_their_shards_alone() -> None:
    """16 ranks in 4 copies of 4 shards hold what 4 ranks hold that share one."""

    def held(shards: int | None, processes: int = 8, nodes: int = 2) -> Plan:
        engine, pools = EngineConfig(device="cuda", shard_ranks=shards), Pools(nodes=nodes, device_memory_gib=80)
        shape = replace(SHAPE, hidden=4096, vocab=65_536, expert_intermediate=4096)
        origin = replace(ORIGIN, shape=shape)
        return make_plan(
            replace(HYBRID, engine=engine, processes=processes, origin=origin, cluster=Cluster(pools=pools))
        )

    full, hybrid, whole = held(None), held(4), held(1)
    assert "4 copies of the weights, each shared by 4 ranks (within a node)" in hybrid.sections["Ranks"]
    assert "16 copies of the weights, each whole on its rank" in whole.sections["Ranks"]
    assert "8 copies of the weights, each shared by 2 ranks (across nodes)" in held(2, 1, 16).sections["Ranks"]
    assert not any("copies" in line for line in full.sections["Ranks"])
    assert hybrid.sections["Memory"] == held(None, processes=4, nodes=1).sections["Memory"]
    assert len({tuple(plan.sections["Memory"]) for plan in (full, hybrid, whole)}) == 3


CHANGES = {
    "--pools.nodes 2": Cluster(pools=Pools(nodes=2)),
    "--pools.placement separate": Cluster(pools=Pools(placement="separate", rollout_nodes=1)),
    "--pools.rollout-nodes 1": Cluster(pools=Pools(placement="separate", rollout_nodes=1)),
    "--pools.device-memory-gib 80": Cluster(pools=Pools(device_memory_gib=80)),
    "--rollout.ray-nodes 2": Cluster(rollout=RolloutLayout(tp=2, ray_workers=1, ray_nodes=2)),
    "--rollout.tensor-parallel 2": Cluster(rollout=RolloutLayout(tp=2)),
    "--rollout.pipeline-parallel 2": Cluster(rollout=RolloutLayout(pp=2)),
    "--rollout.data-parallel 2": Cluster(rollout=RolloutLayout(dp=2)),
    "--rollout.copies-per-device 2": Cluster(rollout=RolloutLayout(dp=2, copies_per_device=2)),
    "--rollout.expert-parallel 2": Cluster(rollout=RolloutLayout(tp=2, ep=2)),
    "--rollout.gpu-memory-utilization 0.5": Cluster(rollout=RolloutLayout(memory_share=0.5)),
    "--rollout.max-model-tokens 99": Cluster(rollout=RolloutLayout(max_model_tokens=99)),
    "--rollout.max-batched-tokens 99": Cluster(rollout=RolloutLayout(max_batched_tokens=99)),
    "--rollout.chunked-prefill True": Cluster(rollout=RolloutLayout(chunked_prefill=True)),
    "--rollout.prefix-cache True": Cluster(rollout=RolloutLayout(prefix_cache=True)),
    "--rollout.dtype float16": Cluster(rollout=RolloutLayout(dtype="float16")),
    "--rollout.device cpu": Cluster(rollout=RolloutLayout(device="cpu")),
    "--rollout.max-requests 8": Cluster(rollout=RolloutLayout(max_requests=8)),
    "--rollout.weights-on-device True": Cluster(rollout=RolloutLayout(weights_on_device=True)),
    "--rollout.sleep True": Cluster(rollout=RolloutLayout(sleep=True)),
    "--rollout.cuda-graph-sizes (8,)": Cluster(rollout=RolloutLayout(cuda_graph_sizes=(8,))),
    "--media.images-column images": Cluster(media=Media("images")),
}


SCHEDULES = {
    "--schedule.mode one_step_off": Cluster(schedule=ScheduleConfig("one_step_off")),
    "--schedule.staleness-threshold 0.5": Cluster(schedule=ScheduleConfig("fully_async", 0.5)),
    "--schedule.parameter-sync-step 2": Cluster(schedule=ScheduleConfig("fully_async", parameter_sync_step=2)),
    "--schedule.required-batches 2": Cluster(schedule=ScheduleConfig("fully_async", required_batches=2)),
    "--schedule.partial-rollout False": Cluster(schedule=ScheduleConfig("fully_async", partial_rollout=False)),
}


@pytest.mark.parametrize("flag", SCHEDULES)
def test_schedules_run_on_one_machine_and_only_where_something_is_sampled(flag: str) -> None:
    refuse_unready(replace(PLAIN, cluster=SCHEDULES[flag]))
    assert "ray" not in str(make_plan(replace(PLAIN, cluster=SCHEDULES[flag]))).lower()
    supervised = replace(PLAIN, app="sft", cluster=SCHEDULES[flag])
    assert flag in [requirement.feature for requirement in make_plan(supervised).missing]
    with pytest.raises(ValueError, match="samples nothing"):
        refuse_unready(supervised)


def test_schedules_that_no_test_has_run_are_refused_with_the_reason() -> None:
    ahead = ScheduleConfig("fully_async", 1.0)
    for schedule in (ahead, ScheduleConfig("one_step_off")):
        refuse_unready(replace(PLAIN, processes=2, cluster=Cluster(schedule=schedule)))
    several = Pools(nodes=2, placement="separate", rollout_nodes=1)
    features = [
        requirement.feature
        for requirement in make_plan(replace(LARGE, cluster=Cluster(schedule=ahead, pools=several))).missing
    ]
    assert "ray" in features
    assert "--pools.placement separate" in features


@pytest.mark.parametrize(("mode", "replicas"), [("one_step_off", 4), ("fully_async", 1)])
def test_one_process_samples_beside_all_ranks_where_nobody_waits(mode: Mode, replicas: int) -> None:
    """In other schedules each rank has a sampler of its own, or two of them share one that spans their devices."""
    one, two = (
        Cluster(rollout=RolloutLayout(engine="vllm", tp=tp, device="cpu"), schedule=ScheduleConfig(mode))
        for tp in (1, 2)
    )
    plans = [str(make_plan(replace(PLAIN, processes=4, cluster=cluster))) for cluster in (one, two)]
    assert f"{replicas} replicas over {replicas} devices" in plans[0]
    assert f"{max(1, replicas // 2)} replicas over {max(2, replicas)} devices" in plans[1]


RAY = {
    "--rollout.ray-workers 2": RolloutLayout(ray_workers=2),
    "--rollout.ray-cpus 0.5": RolloutLayout(ray_workers=1, ray_cpus=0.5),
    "--rollout.ray-gpus 1": RolloutLayout(ray_workers=1, ray_gpus=1),
    "--rollout.weight-transport gloo": RolloutLayout(ray_workers=1, weight_transport="gloo"),
    "--rollout.weight-transport nccl": RolloutLayout(ray_workers=1, weight_transport="nccl"),
    "--rollout.ray-address head:1": RolloutLayout(ray_workers=1, ray_address="head:1"),
}


@pytest.mark.parametrize("flag", RAY)
@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_samplers_in_ray_run_in_every_schedule(flag: str, mode: Mode) -> None:
    spec = replace(PLAIN, cluster=Cluster(rollout=RAY[flag], schedule=ScheduleConfig(mode)))
    refuse_unready(spec)
    assert flag in [requirement.feature for requirement in make_plan(spec).requirements]
    refuse_unready(replace(spec, processes=2))
    refuse_unready(replace(spec, engine=replace(spec.engine, vision="trained")))
    with pytest.raises(ValueError, match="samples nothing"):
        refuse_unready(replace(spec, app="sft"))


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async"])
def test_vllm_runs_in_every_schedule_and_in_ray(mode: Mode) -> None:
    pytest.importorskip("rollout.vllm")
    for layout in (RolloutLayout(), *RAY.values()):
        cluster = Cluster(rollout=replace(layout, engine="vllm"), schedule=ScheduleConfig(mode))
        refuse_unready(replace(PLAIN, cluster=cluster))


def test_a_column_of_images_is_read_where_the_model_sees() -> None:
    seeing = replace(PLAIN, engine=replace(PLAIN.engine, vision="frozen"), cluster=Cluster(media=Media("images")))
    refuse_unready(seeing)
    megatron = replace(seeing.engine, backend="megatron")
    refuse_unready(replace(seeing, engine=megatron))
    refuse_unready(replace(seeing, engine=replace(megatron, vision="trained")))
    with pytest.raises(ValueError, match=r"the model is trained on text: set --trainer\.vision"):
        refuse_unready(replace(seeing, engine=PLAIN.engine))


@pytest.mark.parametrize("flag", CHANGES)
@pytest.mark.parametrize("app", ["grpo", "sft"])
def test_a_field_that_nothing_obeys_is_refused_by_its_flag(flag: str, app: App) -> None:
    spec = replace(PLAIN, app=app, processes=4, cluster=CHANGES[flag])
    features = [requirement.feature for requirement in make_plan(spec).missing]
    assert flag in features
    with pytest.raises(ValueError, match=r"recipe 'plain' can't be run .*; --plan says all"):
        refuse_unready(spec)


def test_vllm_samples_and_what_no_test_has_run_of_it_is_refused_with_the_reason() -> None:
    pytest.importorskip("rollout.vllm")
    for layout in (
        RolloutLayout(engine="vllm", max_model_tokens=9000),
        RolloutLayout(engine="vllm", memory_share=0.5, cuda_graph_sizes=(8,)),
    ):
        refuse_unready(replace(PLAIN, cluster=Cluster(rollout=layout)))
    beside = replace(PLAIN.engine, device="npu")
    with pytest.raises(ValueError, match=r"vLLM beside NPUs.*no Ascend device was at hand"):
        refuse_unready(replace(PLAIN, engine=beside, cluster=Cluster(rollout=RolloutLayout(engine="vllm"))))
    on_the_host = Cluster(rollout=RolloutLayout(engine="vllm", device="cpu"))
    with pytest.raises(ValueError, match=r"--trainer.device npu is not supported.*--allow-untested npu runs it"):
        refuse_unready(replace(PLAIN, engine=beside, cluster=on_the_host))
    refuse_unready(replace(PLAIN, engine=beside, cluster=on_the_host, fake_device=True))
    workers = Cluster(rollout=RolloutLayout(engine="vllm", device="cpu", tp=2, dp=2))
    assert make_plan(replace(PLAIN, engine=beside, cluster=workers)).problems == []
    with pytest.raises(ValueError, match="has no request that replaces weights: train with backend native or vllm"):
        refuse_unready(replace(PLAIN, cluster=Cluster(rollout=RolloutLayout(engine="openai"))))
    supervised = replace(PLAIN, app="sft", cluster=Cluster(rollout=RolloutLayout(engine="vllm")))
    with pytest.raises(ValueError, match="samples nothing"):
        refuse_unready(supervised)


def test_offload_is_for_devices_that_training_and_sampling_share() -> None:
    offload = Cluster(offload=True)
    refuse_unready(replace(PLAIN, cluster=offload))
    for mode in ("one_step_off", "fully_async"):
        with pytest.raises(ValueError, match="sampling and training overlap, on devices of their own"):
            refuse_unready(replace(PLAIN, cluster=replace(offload, schedule=ScheduleConfig(mode))))
    with pytest.raises(ValueError, match="samples nothing"):
        refuse_unready(replace(PLAIN, app="sft", cluster=offload))


def test_the_changes_above_are_of_every_field() -> None:
    names = {flag.split()[0] for flag in CHANGES | SCHEDULES | RAY}
    names |= {"--rollout.engine"}
    names |= {"--rollout.admit", "--rollout.vllm"}  # grpo/native_sampler_test, grpo/vllm_arguments_test
    names |= {"--rollout.kv-cache-memory-gib"}  # grpo/vllm_defaults_test
    names |= {"--schedule.weight-sync"}  # grpo/tests/weight_shards_run_test
    cluster_test_fields = {
        flag_of(f"cluster.{group}.{name}")
        for group in ("pools", "rollout", "schedule", "media")
        for name in vars(getattr(Cluster(), group))
    }
    own_code = {"--sampler-options", "--schedule-options"}  # docs/extend_test
    assert names | own_code == cluster_test_fields


def test_variables_must_be_set_by_whoever_starts_the_program() -> None:
    spec = replace(PLAIN, cluster=Cluster(env=("A=1", "B=2")))
    assert "A=1 B=2 ./bazelw run" in str(make_plan(spec))
    with pytest.raises(ValueError, match="start the program with B=2 in front"):
        refuse_unset(spec.cluster.env, {"A": "1", "B": "3"})
    refuse_unset(spec.cluster.env, {"A": "1", "B": "2", "C": ""})


def test_a_family_that_the_engines_do_not_know_is_missing_by_name() -> None:
    spec = replace(PLAIN, origin=replace(ORIGIN, shape=UNKNOWN))
    with pytest.raises(ValueError, match="family perceptron is not supported: no family of engines has it"):
        refuse_unready(spec)
    refuse_unready(replace(PLAIN, origin=ORIGIN))


def test_a_reference_policy_is_needed_and_there() -> None:
    requirements = {
        requirement.feature: requirement.answer
        for requirement in make_plan(replace(PLAIN, reference_policy=True)).requirements
    }
    assert requirements["reference policy"]
    refuse_unready(replace(PLAIN, reference_policy=True))


def test_ray_starts_separate_pools_and_torchrun_several_nodes() -> None:
    apart = replace(LARGE, cluster=Cluster(pools=Pools(nodes=2, placement="separate", rollout_nodes=3)))
    text = str(make_plan(apart))
    assert "on each of 4 more nodes" in text
    assert "--launch ray" in text
    together = str(make_plan(replace(LARGE, cluster=Cluster(pools=Pools(nodes=2)))))
    assert "torchrun --nnodes 2 --nproc-per-node 8 --node-rank r" in together


SIZE = st.sampled_from([1, 2, 3, 4])


@given(SIZE, SIZE, SIZE, SIZE, st.integers(1, 4), st.integers(1, 60), st.sampled_from(["fsdp2", "megatron"]))
def test_any_settings_can_be_planned(
    tp: int, pp: int, ep: int, etp: int, nodes: int, rows: int, backend: Backend
) -> None:
    cluster = Cluster(pools=Pools(nodes=nodes, device_memory_gib=80))
    spec = replace(LARGE, engine=EngineConfig(backend=backend), cluster=cluster, rows=rows)
    spec = with_layout(spec, tp=tp, pp=pp, ep=ep, etp=etp)
    plan = make_plan(spec)
    text = str(plan)
    assert f"{len(plan.problems)} problems, {len(plan.missing)} capabilities missing" in text
    assert all(problem in text for problem in plan.problems)
    assert ("can be run:" in text) == plan.ready
    assert all(name in text for name in ("Model", "Ranks", "Launch", "Data"))


def test_the_table_counts_what_runs() -> None:
    unready = replace(LARGE, engine=EngineConfig(backend="megatron", batching="padded"))
    table = recipe_table([(PLAIN, PLAIN), (unready, unready)])
    assert table.splitlines()[-1] == "2 recipes, 1 can be run today, 0 untested, 1 shrunk"
    assert "refused: padded |" in table or "refused: megatron, padded |" in table  # it is an extra
    assert "| plain |" in table
    assert "| large | mixture | megatron | 8" in table


@pytest.mark.parametrize(
    ("backend", "says"),
    [("openai", "no place for images in a completion request"), ("native", None), ("vllm", None)],
)
def test_images_are_asked_of_the_sampler(backend: str, says: str | None) -> None:
    pytest.importorskip(f"rollout.{backend}")
    layout = Cluster(rollout=RolloutLayout(engine=backend))
    spec = replace(PLAIN, engine=EngineConfig(device="cpu", vision="trained"), cluster=layout)
    if says is None:
        assert make_plan(spec).ready
        return
    assert says in str(make_plan(spec))
    with pytest.raises(ValueError, match=says):
        refuse_unready(spec)


def test_replay_is_asked_of_the_models_router_and_of_who_samples() -> None:
    replayed = replace(PLAIN, engine=EngineConfig(device="cpu", routing_replay=True))
    dense = replace(SHAPE, model_type="qwen3", experts=0, experts_per_token=0, expert_intermediate=0, intermediate=32)
    refuse_unready(replace(replayed, origin=ORIGIN))
    for spec, says in (
        (replace(replayed, origin=replace(ORIGIN, shape=dense)), "the model has no router"),
        (replace(replayed, model_type="qwen3_5_text"), "the model has no router"),
        (replace(replayed, app="sft", origin=ORIGIN), "a supervised run has no sampler"),
    ):
        with pytest.raises(ValueError, match=says):
            refuse_unready(spec)


def test_the_plan_says_what_replay_needs_where_the_model_is_not_known() -> None:
    replayed = replace(PLAIN, engine=EngineConfig(device="cpu", routing_replay=True))
    unknown, known = make_plan(replayed), make_plan(replace(replayed, model_type="qwen3_5_moe"))
    assert "this needs a model with experts, which is not known here" in str(unknown)
    assert "(--trainer.routing-replay): the model has experts" in str(known)
    assert unknown.ready
    assert known.ready
    assert "routing-replay" not in str(make_plan(PLAIN))


def test_a_model_is_known_by_its_config(tmp_path: Path) -> None:
    assert model_type(None) is None
    assert model_type(tmp_path) is None
    for text, kind in (('{"model_type": "qwen3_5_moe"}', "qwen3_5_moe"), ("[]", None), ("{", None), ("{}", None)):
        (tmp_path / "config.json").write_text(text)
        assert model_type(tmp_path) == kind
