"""The Slurm templates with nodes that are processes of this machine: srun and scontrol are stand-ins, the rest is real.

By hand (a minute): ./bazelw test //build/cluster:cluster_test
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).absolute().parent
ROOT = HERE.parents[1]

# Starts the command once a node, at once, and ends as the worst of them, like srun --kill-on-bad-exit.
SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
pids=()
trap 'kill "${pids[@]}" 2> /dev/null' TERM
for ((node = 0; node < SLURM_NNODES; node++)); do
  SLURM_NODEID=$node NODE_ADDRESS=127.0.0.$((node + 1)) "$@" &
  pids+=($!)
done
worst=0
for pid in "${pids[@]}"; do wait "$pid" || { worst=$?; kill "${pids[@]}" 2> /dev/null; }; done
exit $worst
"""
SCONTROL = '#!/usr/bin/env bash\nfor ((node = 1; node <= SLURM_NNODES; node++)); do echo "127.0.0.$node"; done\n'

# What a job runs: every rank adds its own number to the others' and says what it saw.
RANKS = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from engines.launch import launch

def total():
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    found = {"sum": value.item(), "world": dist.get_world_size(), "node": int(os.environ["GROUP_RANK"])}
    Path(sys.argv[2], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    if sys.argv[1] == "fail" and dist.get_rank() == 1:
        raise ValueError("as asked")

if __name__ == "__main__":
    launch(total)
"""
NODES = """
import json, sys
import ray
ray.init(log_to_driver=False)
print(json.dumps({"nodes": sum(node["Alive"] for node in ray.nodes()), **ray.cluster_resources()}))
ray.shutdown()
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """The variables of a job of two nodes, with the stand-ins first on the PATH."""
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "ranks.py").write_text(RANKS)
    (tmp_path / "nodes.py").write_text(NODES)
    job = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": str(os.getpid()), "PROCESSES": "2"}
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    return {
        **os.environ,
        **job,
        "PATH": f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHON": sys.executable,
        "PYTHONPATH": paths,
        "GLOO_SOCKET_IFNAME": "lo",
    }


def run(script: str, words: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """One job, from the top of the tree."""
    command = ["bash", str(HERE / script), *words]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300)


def test_torchrun_joins_the_ranks_of_all_nodes(slurm: dict[str, str], tmp_path: Path) -> None:
    done = run("train.sbatch", ["ranks", "work", str(tmp_path)], slurm)
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert found == [{"sum": 10.0, "world": 4, "node": node} for node in (0, 0, 1, 1)]


def test_a_rank_that_fails_ends_the_job(slurm: dict[str, str], tmp_path: Path) -> None:
    done = run("train.sbatch", ["ranks", "fail", str(tmp_path)], slurm)
    assert done.returncode != 0
    assert "as asked" in done.stderr


def test_ray_has_every_node_in_its_pool(slurm: dict[str, str], tmp_path: Path) -> None:
    done = run("ray.sbatch", [sys.executable, "-m", "nodes"], {**slurm, "POOLS": "train,rollout"})
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert (found["train"], found["rollout"]) == (2.0, 2.0)
    assert found["nodes"] == 2


@pytest.mark.parametrize("script", ["train.sbatch", "ray.sbatch"])
def test_what_is_missing_is_said_before_anything_starts(script: str, slurm: dict[str, str]) -> None:
    done = run(script, [], slurm)
    assert (done.returncode, "name a" in done.stderr) == (2, True)
    done = run(script, ["true"], {name: value for name, value in slurm.items() if name != "PROCESSES"})
    assert (done.returncode, "--gpus-per-node" in done.stderr) == (2, True)
