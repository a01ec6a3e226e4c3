"""Ray over machines that are namespaces of this one, with a token: for tests tagged `nodes`."""

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from apps.common.testing.machines import Machine, machines

SECONDS = 1500
PORT = 6379
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
NODE = """mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray
until "$0" -m ray.scripts.scripts start --block "$@"; do sleep 1; done"""
"""Again where a busy machine did not start it within Ray's half a minute."""
READY = "import ray, sys; ray.init(log_to_driver=False); sys.exit(len(ray.nodes()) < int(sys.argv[1]))"


@dataclass(frozen=True)
class Nodes:
    """Machines in one Ray cluster; `log` is what commands on the first have written."""

    machines: Sequence[Machine]
    log: Path

    def start(self, words: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start a command on the first machine."""
        return self.machines[0].start([sys.executable, *words], self.log, variables(self.machines[0]))

    def run(self, words: Sequence[str]) -> int:
        """Run a command on the first machine to its end; return its status."""
        return self.start(words).wait(SECONDS)

    def sampling(self) -> list[Machine]:
        """Return the machines on which samplers are."""
        search = ["pgrep", "-f", "^ray::_Sampler"]
        return [each for each in self.machines if each.start(search, self.log.parent / "pids").wait(SECONDS) == 0]

    @property
    def text(self) -> str:
        """The end of what commands on the first machine have written."""
        return self.log.read_text()[-6000:]


def variables(head: Machine) -> dict[str, str]:
    """Return the environment of commands on a machine, by the cluster's first one."""
    own = {name: os.environ[name] for name in ("TESSERA_VLLM_PYTHON",) if name in os.environ}
    paths = {"PYTHONPATH": ":".join(filter(None, sys.path)), "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": "/tmp"}
    return {**own, **paths, **TOKEN, "RAY_ADDRESS": f"{head.address}:{PORT}"}


@contextmanager
def ray_nodes(folder: Path, cpus: Sequence[int]) -> Iterator[Nodes]:
    """Start a machine with so many processors for each entry, with a disk that all share at `folder`/shared."""
    shared = folder / "shared"
    shared.mkdir()
    with machines(len(cpus), folder, shared) as made:
        first = made[0]
        given = {name: value for name, value in variables(first).items() if name != "RAY_ADDRESS"}
        for machine, count in zip(made, cpus, strict=True):
            place = ["--head", "--port", str(PORT), "--include-dashboard=false"]
            place = place if machine is first else ["--address", f"{first.address}:{PORT}"]
            place += ["--node-ip-address", machine.address, "--num-cpus", str(count), "--object-store-memory=100000000"]
            machine.start(["sh", "-c", NODE, sys.executable, *place], folder / f"node{machine.number}", given)
        nodes, end = Nodes(made, folder / "log"), time.monotonic() + SECONDS
        while nodes.run(["-c", READY, str(len(cpus))]) != 0:
            assert time.monotonic() < end, (folder / "node0").read_text()[-3000:] + nodes.text
            time.sleep(1)
        yield nodes
