"""The Slurm templates under Debian's own Slurm, over two machines that are namespaces of this one and share a folder.

By hand, as root, with `apt-get install slurm-wlm munge`: `./bazelw test --config=nodes //apps/common:tests/slurm_test`.
"""

import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from apps.common.testing.machines import Machine, machines, missing

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"
LACKS = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
REASON = missing() or (f"needs {', '.join(LACKS)}: apt-get install slurm-wlm munge" if LACKS else "")
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)
TREE = Path(__file__).absolute().parents[3]
SECONDS = 1500
CONF = """
ClusterName=tessera
SlurmctldHost=machine0(10.231.0.1)
SlurmUser=root
AuthType=auth/munge
StateSaveLocation={disk}/state
SlurmdSpoolDir={disk}/spool
SlurmctldPidFile={disk}/slurmctld.pid
SlurmdPidFile={disk}/slurmd.pid
SlurmctldLogFile={logs}/slurmctld.log
SlurmdLogFile={logs}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
NodeName=machine[0-1] NodeAddr=10.231.0.[1-2] CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
DAEMONS = """
set -e
mkdir -p {disk}/state {disk}/spool /tmp/ray /run/munge
mount -t tmpfs tmpfs /tmp/ray
mount -t tmpfs -o mode=755 tmpfs /run/munge
munged --force --key-file={key} --pid-file=/run/munge/pid --seed-file=/run/munge/seed --log-file={logs}/munged-$0.log
if [ "$0" = machine0 ]; then slurmctld; fi
exec slurmd -D -N "$0"
"""
SFT = ["apps.sft.main", "--demonstrations", "200", "--batch-size", "8", "--max-steps", "4", "--allow-untested", "nodes"]


@dataclass(frozen=True)
class Slurm:
    """A cluster of two nodes; `folder` is seen by both."""

    head: Machine
    folder: Path
    variables: dict[str, str]

    def job(self, template: str, words: Sequence[str]) -> tuple[int, str]:
        """Submit a template and wait for its end; return its exit status and what it printed."""
        log = self.folder / "job.log"
        sbatch = ["sbatch", "--wait", "--nodes", "2", "--chdir", str(TREE), "--output", str(log)]
        command = [*sbatch, str(TREE / "build/cluster" / template), *words]
        status = self.head.start(command, self.folder / "sbatch.log", self.variables).wait(SECONDS)
        told = [
            path.read_text(errors="replace")[-100_000:] for path in (log, self.folder / "sbatch.log") if path.exists()
        ]
        return status, "\n".join(told)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    folder = tmp_path / "shared"
    folder.mkdir()
    key, conf = folder / "munge.key", folder / "slurm.conf"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    with machines(2, tmp_path, folder) as both:
        names = {"disk": both[0].disk, "logs": folder, "key": key}
        conf.write_text(CONF.format(**names))
        paths = {"PYTHONPATH": ":".join(filter(None, sys.path)), "PYTHON": sys.executable, "PROCESSES": "1"}
        variables = {
            **paths,
            "SLURM_CONF": str(conf),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        variables["RAY_TMPDIR"] = "/tmp"  # names of sockets are short
        for machine in both:
            script = ["sh", "-c", DAEMONS.format(**names), f"machine{machine.number}"]
            machine.start(script, folder / f"daemons{machine.number}", variables)
        cluster, end = Slurm(both[0], folder, variables), time.monotonic() + 120
        while both[0].start(["srun", "--nodes", "2", "true"], folder / "try", variables).wait(120) != 0:
            logs = "\n".join(f"{path}: {path.read_text()[-1500:]}" for path in folder.glob("*") if path != key)
            assert time.monotonic() < end, logs
            time.sleep(1)
        yield cluster


def test_torchrun_trains_on_all_nodes_of_a_job(slurm: Slurm) -> None:
    words = [*SFT, "--pools.nodes", "2", "--run-dir", str(slurm.folder / "run")]
    status, told = slurm.job("train.sbatch", words)
    assert status == 0, told
    assert "sft 4/4 " in told
    status, told = slurm.job("train.sbatch", words)
    assert status != 0, "the folder holds a run already"
    assert "holds a run already" in told


def test_one_command_in_a_rays_cluster_trains_on_all_nodes_of_a_job(slurm: Slurm) -> None:
    words = [sys.executable, "-m", *SFT, "--launch", "ray", "--pools.nodes", "2"]
    status, told = slurm.job("ray.sbatch", [*words, "--run-dir", str(slurm.folder / "run")])
    assert status == 0, told
    assert "ranks 0 to 0 on machine" in told
    assert "[rank 0] sft 4/4 " in told
