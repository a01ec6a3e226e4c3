from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from apps.common.cluster import Cluster, Media, Pools, RolloutLayout, changed_fields, kept_apart
from apps.common.run.config_file import dump_config, load_config
from apps.common.testing.own_sampler import OWN_SAMPLER
from engines import EngineConfig
from runplan.samplers.native import shares_weights
from schedules.config import ScheduleConfig


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Pools(nodes=0), "nodes must be at least 1"),
        (lambda: Pools(placement="apart"), "one of 'colocated', 'separate'"),  # type: ignore[arg-type]
        (lambda: Pools(placement="separate"), "rollout_nodes above 0"),
        (lambda: Pools(rollout_nodes=2), "colocated"),
        (lambda: Pools(device_memory_gib=float("nan")), "device_memory_gib"),
        (lambda: RolloutLayout(engine="sglang"), "one of 'native', 'vllm'"),
        (lambda: RolloutLayout(memory_share=1.0), "memory_share"),
        (lambda: RolloutLayout(tp=2, ep=4), "set it to 2"),
        (lambda: RolloutLayout("vllm", dp=3, copies_per_device=2), "--rollout.data-parallel a multiple of 2"),
        (
            lambda: RolloutLayout("vllm", dp=2, copies_per_device=2, memory_share=0.5),
            "utilization below 0.5",
        ),
        (lambda: RolloutLayout(cuda_graph_sizes=(8, 0)), "at least 1 each"),
        (lambda: RolloutLayout(ray_workers=-1), "ray_workers must be at least 0"),
        (lambda: RolloutLayout(ray_workers=1, ray_cpus=0), "ray_cpus must be above 0"),
        (lambda: RolloutLayout(ray_workers=1, ray_cpus=float("nan")), "ray_cpus must be above 0"),
        (lambda: RolloutLayout(ray_workers=1, ray_address=" "), "ray_address is empty"),
        (lambda: RolloutLayout(ray_address="head:6379"), "no effect without ray_workers"),
        (lambda: RolloutLayout(ray_cpus=0.5), "no effect without ray_workers"),
        (lambda: RolloutLayout(ray_nodes=2), "ray_nodes: no effect without ray_workers"),
        (lambda: RolloutLayout("vllm", ray_workers=1, ray_nodes=2), "tp 1 is no multiple of ray_nodes 2"),
        (lambda: RolloutLayout("vllm", pp=3, ray_workers=1, ray_nodes=2), "tp x pp = 3 is no multiple of ray_nodes 2"),
        (lambda: RolloutLayout(ray_gpus=1), "ray_gpus: no effect without ray_workers"),
        (lambda: RolloutLayout(weight_transport="gloo"), "weight_transport: no effect without ray_workers"),
        (lambda: RolloutLayout(ray_workers=1, ray_gpus=-1), "ray_gpus must be at least 0"),
        (lambda: RolloutLayout(ray_workers=1, weight_transport="hccl"), "nobody has run weights between NPUs"),
        (
            lambda: RolloutLayout(ray_workers=1, weight_transport=cast(Any, "tcp")),
            "weight_transport must be one of 'auto', 'objects', 'gloo', 'nccl', 'hccl', got 'tcp'",
        ),
        (
            lambda: RolloutLayout(ray_workers=2, ray_gpus=0.5, weight_transport="nccl"),
            "needs a whole device for each sampler, and ray_gpus is 0.5",
        ),
        (lambda: RolloutLayout(dtype="float8"), "dtype must be one of 'auto'"),  # type: ignore[arg-type]
        (lambda: RolloutLayout(max_requests=0), "max_requests must be at least 1"),
        (lambda: RolloutLayout(vllm=("block_size=32",)), "no effect with engine 'native'"),
        (lambda: RolloutLayout("vllm", vllm=("block_size",)), "not NAME=VALUE, such as block_size=32"),
        (lambda: RolloutLayout("vllm", vllm=("block_size=1", "block_size=2")), "names block_size twice"),
        (lambda: ScheduleConfig(mode="later"), "one of 'sync'"),
        (lambda: ScheduleConfig(staleness_threshold=0.5), "use mode 'fully_async'"),
        (lambda: ScheduleConfig(mode="one_step_off", partial_rollout=True), "use mode 'fully_async'"),
        (lambda: ScheduleConfig(mode="fully_async", staleness_threshold=-1), "staleness_threshold"),
        (lambda: Media(images_column=""), "must name a column"),
        (lambda: Cluster(env=("A B=1",)), "NAME=value"),
        (lambda: Cluster(env=("A",)), "NAME=value"),
        (lambda: Cluster(env=("A=1", "A=2")), "twice"),
    ],
)
def test_values_that_cannot_work_are_refused_where_they_are_made(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


def test_fully_async_samples_ahead_and_interrupts_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    ahead, told = ScheduleConfig("fully_async"), ScheduleConfig("fully_async", 0.0, partial_rollout=False)
    assert (ahead.stale_share, ahead.interrupts) == (0.5, True)
    assert (told.stale_share, told.interrupts) == (0.0, False)
    for mode in ("sync", "one_step_off"):
        assert (ScheduleConfig(mode).stale_share, ScheduleConfig(mode).interrupts) == (0.0, False)
        assert ScheduleConfig(mode).correction == "none"
    assert (ahead.correction, told.correction) == ("mask", "none")
    path = tmp_path / "config.json"
    path.write_text(dump_config(ScheduleConfig()).replace("null", "0.0", 1).replace("null", "false", 1))
    assert load_config(ScheduleConfig, path).stale_share == 0  # a run's file that says what it does is read


FULL = Cluster(
    pools=Pools(nodes=4, placement="separate", rollout_nodes=2, device_memory_gib=80),
    rollout=RolloutLayout(
        *(OWN_SAMPLER, 2, 2, 2, 4, 0.3, 4096, 1024, True, True, (1, 2), 2, 0.5, 2.0, 2, "head:6379", "gloo"),
        *("any_step", 4.0, "bfloat16", 8, True, ("block_size=32", "kv_cache_dtype=auto"), True, "cpu"),
        pp=2,
    ),
    schedule=ScheduleConfig("fully_async", 0.5, 2, 2, True, "shards"),
    offload=True,
    media=Media("images"),
    env=("A=1",),
)


def leaves(config: Any, prefix: str = "") -> Iterator[str]:
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from leaves(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name


def test_changes_are_found_by_name_and_there_are_none_in_the_default() -> None:
    assert changed_fields(Cluster()) == []
    options = {"rollout.engine_options", "schedule.options"}  # of own code, which this has not
    assert set(changed_fields(FULL)) == set(leaves(Cluster())) - options
    assert changed_fields(replace(Cluster(), pools=Pools(nodes=2))) == ["pools.nodes"]


def test_it_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(dump_config(FULL))
    assert load_config(Cluster, path) == FULL


def test_all_that_is_wrong_with_a_sampler_is_told_at_once_and_what_follows_from_it_is_not() -> None:
    with pytest.raises(ValueError, match="tp must be at least 1, got 0") as refusal:
        RolloutLayout(tp=0, dp=0, ep=3, memory_share=2.0)
    reasons = str(refusal.value).split("; ")
    assert [reason.split()[0] for reason in reasons] == ["tp", "dp", "memory_share"]
    with pytest.raises(ValueError, match="ep must be 1, tp = 2") as refusal:
        RolloutLayout(tp=2, ep=3, ray_cpus=2.0)
    assert "ray_cpus: no effect without ray_workers" in str(refusal.value)


def test_changes_are_told_with_their_values() -> None:
    assert Cluster().changed == []
    changed = Cluster(pools=Pools(nodes=2), media=Media("seen"), env=("A=1",)).changed
    assert changed == [("pools.nodes", 2), ("media.images_column", "seen"), ("env", ("A=1",))]


def test_settings_that_keep_a_samplers_weights_apart_are_known_to_a_plan() -> None:
    gpu = EngineConfig(device="cuda")
    assert kept_apart(gpu, Cluster()) is None
    assert shares_weights(gpu, Cluster(), 1, 1)
    for engine, cluster, ranks in [
        (EngineConfig(device="npu", weights="replicated"), Cluster(), 1),
        (gpu, Cluster(offload=True), 1),
        (gpu, Cluster(schedule=ScheduleConfig("one_step_off")), 1),
        (gpu, Cluster(schedule=ScheduleConfig("fully_async")), 1),
        (gpu, Cluster(rollout=RolloutLayout(engine="vllm")), 1),
        (gpu, Cluster(rollout=RolloutLayout(ray_workers=1)), 1),
    ]:
        assert kept_apart(engine, cluster) == cluster.weights_apart(engine) is not None
        assert not shares_weights(engine, cluster, ranks, ranks)
