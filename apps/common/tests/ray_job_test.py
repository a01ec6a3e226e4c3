"""The RayJob that users apply: its fields, and its entrypoint, which a real cluster runs as Ray's job server does.

Minutes, as a run starts its programs anew: `./bazelw test --config=full //apps/common:tests/ray_job_test`.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from apps.common.launch.flag import parse_launch_flag
from apps.quickstart.model import ensure_tiny_model
from apps.sft.main import command_line
from rollout.workers.ray_local import local_nodes
from schedules.ray.cluster import paths_of_children

FILE = Path(__file__).absolute().parents[3] / "build/cluster/rayjob.yaml"
SECONDS = 600


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    spec: dict[str, Any] = yaml.safe_load(FILE.read_text())
    return spec


def test_its_machines_are_those_that_the_entrypoint_asks_for(job: dict[str, Any]) -> None:
    program, *words = shlex.split(job["spec"]["entrypoint"])
    assert program == "tessera-sft"
    rest, in_ray = parse_launch_flag(words)
    assert in_ray
    config = command_line().parse(rest)
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert config.cluster.pools.nodes == workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]
    (container,) = workers["template"]["spec"]["containers"]
    assert config.nproc_per_node == int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert config.nproc_per_node * config.threads <= int(container["resources"]["limits"]["cpu"])


def test_all_of_its_pods_have_one_image_one_disk_and_the_token(job: dict[str, Any]) -> None:
    cluster = job["spec"]["rayClusterSpec"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    pods = [group["template"]["spec"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    assert len({json.dumps(pod["volumes"]) for pod in pods}) == 1
    for (container,) in (pod["containers"] for pod in pods):
        given = {entry["name"]: entry for entry in container["env"]}
        assert given["RAY_AUTH_MODE"]["value"] == "token"
        assert given["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"]["key"] == "token"
        assert container["image"] == pods[0]["containers"][0]["image"]
        (mount,) = container["volumeMounts"]
        assert mount["mountPath"] == "/shared"
    words = shlex.split(job["spec"]["entrypoint"])
    assert all(word.startswith("/shared/") for word in words if word.startswith("/"))


@pytest.fixture
def address() -> Iterator[str]:
    """A head and two machines with two processors each."""
    with paths_of_children(), local_nodes([2.0, 2.0]) as found:
        yield found


def entrypoint(job: dict[str, Any], folder: Path) -> str:
    """The entrypoint as a job on processors: the same words, with smaller numbers and the folder for the disk."""
    words = (
        job["spec"]["entrypoint"].replace("/shared", str(folder)).replace("--nproc-per-node 8", "--nproc-per-node 1")
    )
    return str(words).replace("tessera-sft", f"{sys.executable} -m apps.sft.main")


def test_a_cluster_runs_the_entrypoint_and_ends_it_when_the_job_is_deleted(
    job: dict[str, Any], tmp_path: Path, address: str
) -> None:
    """Ray's job server runs it in a shell of its own group, with RAY_ADDRESS, and ends the group with SIGTERM."""
    ensure_tiny_model(tmp_path / "model", 0)
    rows = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": str(i)}] for i in range(64)]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"messages": row}) for row in rows))
    command = entrypoint(job, tmp_path)
    log = tmp_path / "log"

    def begin(extra: str) -> "subprocess.Popen[bytes]":
        with log.open("wb") as file:
            return subprocess.Popen(
                f"{command} --batch-size 8 {extra}",
                shell=True,
                cwd=tmp_path,
                env={**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    running = begin("--max-steps 4 --save-every 2")
    assert running.wait(SECONDS) == 0, log.read_text()[-3000:]
    text = log.read_text()
    assert "ranks 0 to 0 on " in text
    assert "ranks 1 to 1 on " in text
    assert "[rank 0] " in text
    running = begin("--max-steps 100000 --save-every 2 --resume")
    end = time.monotonic() + SECONDS
    while not (tmp_path / "run/checkpoints/step-000008").exists():
        assert running.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < end, log.read_text()[-3000:]
        time.sleep(0.2)
    family = psutil.Process(running.pid).children(recursive=True)
    os.killpg(running.pid, signal.SIGTERM)
    running.wait(SECONDS)
    assert not psutil.wait_procs(family, timeout=SECONDS)[1]
