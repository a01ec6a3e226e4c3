"""Who has which CUDA device where Ray's samplers compute on some, and what weights reach them through."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.common.cluster import RolloutLayout
from apps.common.ray_devices import (
    check_ray_devices,
    devices_left,
    gpus_each,
    ray_settings,
    sampler_devices,
    transport_of,
)
from apps.grpo.config import GrpoConfig
from apps.grpo.testing.schedules import small
from engines import EngineConfig
from schedules.config import ScheduleConfig

CPU, CUDA, OTHER = (torch.device(kind) for kind in ("cpu", "cuda", "mps"))


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four devices, as a launcher names them; no cluster that runs already."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,4,5")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def asked(device: Any = "cuda", nproc_per_node: int = 1, **layout: Any) -> GrpoConfig:
    config = small(Path("/nowhere"), ScheduleConfig("sync"), nproc_per_node=nproc_per_node)
    rollout = RolloutLayout(**{"ray_workers": 1, **layout})
    return replace(config, engine=EngineConfig(device=device), cluster=replace(config.cluster, rollout=rollout))


def test_a_cluster_of_this_machine_hands_out_what_no_rank_trains_on() -> None:
    assert devices_left(("2", "3", "4"), 1) == ("3", "4")
    assert devices_left(("2",), 2) == ()
    assert sampler_devices(asked(), 1) == ("3", "4", "5")
    assert sampler_devices(asked(), 3) == ("5",)
    assert sampler_devices(asked("cpu"), 1) is None


@pytest.mark.parametrize(
    ("config", "gpus", "transport"),
    [
        (asked(), 1.0, "nccl"),
        (asked(ray_gpus=2), 2.0, "nccl"),
        (asked(ray_gpus=0.5), 0.5, "objects"),
        (asked(weight_transport="gloo"), 1.0, "gloo"),
        (asked(weight_transport="objects"), 1.0, "objects"),
        (asked(engine="vllm", tp=2, dp=2, copies_per_device=2), 2.0, "nccl"),
        (asked("cpu"), 0.0, "objects"),
        (asked("cpu", weight_transport="gloo"), 0.0, "gloo"),
        (asked(ray_address="127.0.0.1:6379"), 1.0, "nccl"),
        (asked(ray_address="10.0.0.5:6379"), 1.0, "objects"),
        (asked(ray_address="10.0.0.5:6379", weight_transport="nccl"), 1.0, "nccl"),
    ],
)
def test_each_sampler_has_its_devices_and_its_way_for_weights(config: GrpoConfig, gpus: float, transport: str) -> None:
    if config.cluster.rollout.engine == "vllm":
        pytest.importorskip("rollout.vllm")
    assert (gpus_each(config), transport_of(config)) == (gpus, transport)


def test_vllm_on_the_cpu_beside_a_cuda_trainer_has_no_device() -> None:
    config = asked()
    beside = replace(config.cluster.rollout, engine="vllm", device="cpu")
    config = replace(config, cluster=replace(config.cluster, rollout=beside))
    assert (gpus_each(config), transport_of(config), sampler_devices(config, 1)) == (0.0, "objects", None)
    check_ray_devices(config, CUDA)


def test_what_fits_is_not_refused() -> None:
    for config in (asked(ray_workers=3), asked(ray_workers=6, ray_gpus=0.5), asked(ray_workers=2, nproc_per_node=2)):
        check_ray_devices(config, CUDA)
    check_ray_devices(asked("cpu", weight_transport="gloo"), CPU)


@pytest.mark.parametrize(
    ("config", "device", "problem"),
    [
        (asked(ray_workers=4), CUDA, "4 of 1 CUDA devices each need 4, and of 4 here 1 train and 3 are left"),
        (asked(ray_workers=1, nproc_per_node=4), CUDA, "need 1, and of 4 here 4 train and 0 are left"),
        (asked(ray_workers=2, engine="vllm", tp=2), CUDA, "2 of 2 CUDA devices each need 4, and of 4"),
        (asked(ray_gpus=1, engine="vllm", tp=2), CUDA, "ray-gpus 1: each sampler's vLLM spans 2 devices"),
        (asked(ray_gpus=0), CUDA, "ray-gpus 0: samplers on CUDA need a device"),
        (asked("cpu", ray_gpus=1), CPU, "ray-gpus: these samplers compute on no CUDA device"),
        (asked("cpu", weight_transport="nccl"), CPU, "nccl passes weights between CUDA devices"),
        (asked("npu"), OTHER, "ray-workers on mps: no test has run"),
    ],
)
def test_what_can_not_be_is_refused_with_the_numbers(config: GrpoConfig, device: torch.device, problem: str) -> None:
    if config.cluster.rollout.engine == "vllm":
        pytest.importorskip("rollout.vllm")
    with pytest.raises(ValueError, match=problem):
        check_ray_devices(config, device)


def test_a_cluster_that_runs_already_counts_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its devices are not this machine's alone: the pool is held to what it has."""
    check_ray_devices(asked(ray_workers=16, ray_address="10.0.0.5:6379"), CUDA)
    monkeypatch.setitem(os.environ, "RAY_ADDRESS", "10.0.0.5:6379")
    check_ray_devices(asked(ray_workers=16), CUDA)


@pytest.mark.parametrize(
    ("config", "ranks", "through"),
    [
        (asked("cpu"), 2, "gloo"),
        (asked("cpu"), 1, None),
        (asked("cpu", weight_transport="objects"), 2, None),
        (asked(), 2, "nccl"),
        (asked(ray_address="10.0.0.5:6379"), 2, "nccl"),
        (asked(ray_gpus=0.5), 2, "gloo"),
        (asked(weight_transport="gloo"), 2, "gloo"),
    ],
)
def test_shards_go_straight_to_samplers_unless_somebody_asks_for_the_store(
    config: GrpoConfig, ranks: int, through: str | None
) -> None:
    sharded = replace(config.cluster, schedule=ScheduleConfig("sync", weight_sync="shards"))
    for cluster, expected in ((sharded, through), (config.cluster, None)):
        settings = ray_settings(replace(config, cluster=cluster), ranks)
        assert settings is not None
        assert settings.shards == expected


def test_ranks_elsewhere_do_not_reach_samplers_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    config = asked("cpu")
    sharded = replace(
        config.cluster,
        schedule=ScheduleConfig("sync", weight_sync="shards"),
        pools=replace(config.cluster.pools, nodes=2),
    )
    settings = [ray_settings(replace(config, cluster=sharded), 2)]
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.5:6379")
    settings.append(ray_settings(replace(config, cluster=sharded), 2))
    assert [one and one.shards for one in settings] == [None, "gloo"]
