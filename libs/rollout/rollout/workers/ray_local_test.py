"""A Ray cluster of this machine listens on loopback alone, by what the kernel says of its processes."""

import os
import subprocess
import sys

import pytest
import ray

from rollout.testing.listening import listening
from rollout.workers.ray_local import is_loopback, local_nodes, local_ray, on_loopback

VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
ASK = """
import sys, ray
from rollout.testing.listening import listening
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
        found = listening()
    assert {"gcs_server", "raylet"} <= found.keys()
    assert set().union(*found.values()) == {"127.0.0.1"}
    assert VARIABLE not in os.environ


def test_several_nodes_stay_on_loopback_and_another_process_finds_them() -> None:
    with local_nodes([1, 2]) as address:
        paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        told = subprocess.run(
            [sys.executable, "-c", ASK, address], env=paths, capture_output=True, text=True, timeout=120, check=False
        )
        found = listening()
    assert told.stdout.split() == ["2", "1", "False"], told.stderr[-2000:]
    assert {"gcs_server", "raylet"} <= found.keys()
    assert set().union(*found.values()) == {"127.0.0.1"}
    assert not ray.is_initialized()


def test_what_was_set_before_is_set_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")
    with on_loopback():
        assert os.environ[VARIABLE] == "0"
    assert os.environ[VARIABLE] == "1"


def test_addresses_of_other_machines_are_not_loopback() -> None:
    assert not is_loopback("10.0.0.5:6379")
    assert is_loopback("localhost:6379")
