"""A Ray cluster of this machine listens on loopback alone, by what the kernel says of its processes."""

import os
import subprocess
import sys
import time

import pytest
import ray

from rollout.testing.listen_addresses import listen_addresses
from rollout.workers.placement import Demand, refusal
from rollout.workers.ray_local import VISIBLE, is_loopback, local_nodes, local_ray, on_loopback

COUNT = """
import sys, ray
from rollout.workers.ray_local import connect
connect(sys.argv[1])
print(len(ray.nodes()))
"""
VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
ASK = """
import sys, ray
from rollout.testing.listen_addresses import listen_addresses
from rollout.workers.ray_local import connect
connect(sys.argv[1])
where = ray.remote(lambda: ray.get_runtime_context().get_node_id())
homes = ray.get([where.options(num_cpus=2).remote() for _ in range(2)])
print(len(ray.nodes()), len(set(homes)), ray.get_runtime_context().get_node_id() in homes)
"""


def test_a_cluster_of_one_node_stays_on_loopback() -> None:
    with local_ray(cpus=1, store_bytes=80 << 20) as address:
        assert is_loopback(address)
        assert ray.get(ray.remote(lambda: 3).remote()) == 3
        found = listen_addresses()
    assert {"gcs_server", "raylet"} <= found.keys()
    assert set().union(*found.values()) == {"127.0.0.1"}
    assert VARIABLE not in os.environ


def test_it_hands_out_the_devices_that_it_is_told_of_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, whether they are there or not; this process's own are as they were."""
    monkeypatch.setenv(VISIBLE, "3,5,7")
    with local_ray(cpus=2, store_bytes=80 << 20, cuda=("5", "7")):
        assert os.environ[VISIBLE] == "3,5,7"
        assert ray.cluster_resources()["GPU"] == 2

        def seen(held: float) -> str:
            time.sleep(held)
            return os.environ[VISIBLE]

        task = ray.remote(seen).options(num_gpus=1)
        assert set(ray.get([task.remote(3.0), task.remote(3.0)], timeout=60)) == {"5", "7"}
        demand = Demand(3, cpus=0.1, gpus=1)
        why = refusal(demand, [ray.cluster_resources()])
        assert why is not None
        assert "3 samplers of 0.1 CPU and 1 GPU each find 2 places on 1 nodes (2 CPU, 2 GPU on node 0)" in why
    monkeypatch.delenv(VISIBLE)
    with local_ray(cpus=1, store_bytes=80 << 20, cuda=()):
        assert VISIBLE not in os.environ
        assert "GPU" not in ray.cluster_resources()


def test_several_nodes_stay_on_loopback_and_another_process_finds_them() -> None:
    with local_nodes([1, 2]) as address:
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        told = subprocess.run(
            [sys.executable, "-c", ASK, address], env=paths, capture_output=True, text=True, timeout=120, check=False
        )
        found = listen_addresses()
    assert told.stdout.split() == ["2", "1", "False"], told.stderr[-2000:]
    assert {"gcs_server", "raylet"} <= found.keys()
    assert set().union(*found.values()) == {"127.0.0.1"}
    assert not ray.is_initialized()


def test_a_stranger_is_turned_away() -> None:
    """One with another token, or with none (Ray 2.59 and later ask for one; this process and its children have it)."""
    with local_ray(cpus=1, store_bytes=80 << 20) as address:
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        given = [{"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}]
        asking = [
            subprocess.Popen(
                [sys.executable, "-c", COUNT, address],
                env=paths | one,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for one in [*given, {"RAY_AUTH_MODE": "disabled"}]
        ]  # at once: those that are turned away try for half a minute
        said = [one.communicate(timeout=120) for one in asking]
    assert said[0][0].split() == ["1"], said[0][1][-2000:]
    for one, (_, errors) in zip(asking[1:], said[1:], strict=True):
        assert one.returncode != 0
        assert "Authentication token is missing or incorrect" in errors


def test_what_was_set_before_is_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    with on_loopback():
        assert os.environ[VARIABLE] == "0"
    assert os.environ[VARIABLE] == "1"


def test_addresses_of_other_machines_are_not_loopback() -> None:
    assert not is_loopback("10.0.0.5:6379")
    assert is_loopback("localhost:6379")
