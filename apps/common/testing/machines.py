"""Several machines on one: Linux namespaces with addresses, processes, shared memory and disks of their own.

Each machine is a network, mount, PID, IPC and host name namespace; a bridge in a further one joins them. Root is
needed, and `unshare`, `nsenter`, `ip` and `tc`. Nothing leaves the namespaces, and all of them end with the block.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

NEEDS = ("unshare", "nsenter", "ip", "tc")
_NETWORK = "10.231.0"
_PATH = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
_ENV = {**os.environ, "PATH": _PATH}


@dataclass(frozen=True)
class Machine:
    """One machine: the process that holds its namespaces, its number, and its disk, a folder that it alone sees."""

    pid: int
    number: int
    disk: Path

    @property
    def address(self) -> str:
        """The address that the other machines reach it by."""
        return f"{_NETWORK}.{self.number + 1}"

    def start(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a program there, in the folder of its disk; what it prints goes to `log`, which all can see."""
        inside = ["nsenter", "-t", str(self.pid), "-n", "-m", "-p", "-i", "-u", "env", f"--chdir={self.disk}"]
        places = {"GLOO_SOCKET_IFNAME": "eth0", "TMPDIR": str(self.disk / "tmp"), "HOME": str(self.disk)}
        with log.open("ab") as file:
            return subprocess.Popen(
                [*inside, *command],
                stdout=file,
                stderr=file,
                env={**_ENV, **places, **(env or {})},
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill every process of the machine at once, as a lost power supply does."""
        os.kill(self.pid, 9)


def missing() -> str | None:
    """Return why there can be no machines here, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    if lacks := [name for name in NEEDS if shutil.which(name, path=_PATH) is None]:
        return f"needs {', '.join(lacks)}"
    tried = subprocess.run(["unshare", "-n", "-m", "-p", "-f", "true"], capture_output=True, check=False, env=_ENV)
    return None if tried.returncode == 0 else "needs namespaces, which this kernel or sandbox refuses"


@contextmanager
def machines(
    count: int,
    folder: Path,
    shared: Path | None = None,
    rate: str | None = None,
    delay: float = 0.0,
    loss: float = 0.0,
) -> Iterator[list[Machine]]:
    """Make `count` machines whose disks are at `folder`/disk, each machine's own and empty.

    `shared`: a folder that all of them see at its path; others of the host they see too, to read the same tree.
    `rate`: what each can send, in words of `tc` ("200mbit"). `delay`: seconds that a frame needs to leave a machine,
    and again to reach one; `loss`: the share that is lost each time.
    """
    disk = folder / "disk"
    disk.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        switch = _holder(stack, ["-n"])
        _run(switch, "-n", "ip link add bridge0 type bridge")
        _run(switch, "-n", "ip link set bridge0 up")
        made = []
        for number in range(count):
            machine = Machine(_holder(stack, ["-n", "-m", "-p", "-i", "-u", "--mount-proc"]), number, disk)
            _connect(switch, machine, rate)
            if delay or loss:
                _relay(stack, switch, machine, delay, loss)
            _mount(machine, count, shared)
            made.append(machine)
        yield made


def _connect(switch: int, machine: Machine, rate: str | None) -> None:
    port = f"port{machine.number}"
    _run(switch, "-n", f"ip link add {port} type veth peer name eth0 netns {machine.pid}")
    _run(switch, "-n", f"ip link set {port} master bridge0")
    _run(switch, "-n", f"ip link set {port} up")
    _run(machine.pid, "-n", f"ip addr add {machine.address}/24 dev eth0")
    _run(machine.pid, "-n", "ip link set eth0 up")
    _run(machine.pid, "-n", "ip link set lo up")
    if rate is not None:
        _run(machine.pid, "-n", f"tc qdisc add dev eth0 root tbf rate {rate} burst 256kb latency 100ms")


def _relay(stack: ExitStack, switch: int, machine: Machine, delay: float, loss: float) -> None:
    """Put a relay between a machine's port and the bridge (`apps.common.testing.relay`)."""
    port, inner, outer = (f"{name}{machine.number}" for name in ("port", "inner", "outer"))
    for command in (
        f"ip link add {inner} type veth peer name {outer}",
        f"ip link set {port} nomaster",
        f"ip link set {outer} master bridge0",
        f"ip link set {inner} up",
        f"ip link set {outer} up",
    ):
        _run(switch, "-n", command)
    program = [sys.executable, "-S", str(Path(__file__).with_name("relay.py"))]
    _run(machine.pid, "-n", [*program, "plain", "eth0"])
    inside = ["nsenter", "-t", str(switch), "-n", *program, "relay", port, inner, str(delay), str(loss)]
    process = subprocess.Popen(inside, env=_ENV)
    stack.callback(process.wait)
    stack.callback(process.kill)


def _mount(machine: Machine, count: int, shared: Path | None) -> None:
    """Mount the disk and shared memory, and write the host name, which resolves as those of the others do."""
    if shared is not None and shared.is_relative_to(machine.disk):
        raise ValueError(f"{shared} lies on the disks, which are each machine's own: choose a folder beside them")
    name = f"machine{machine.number}"
    for place in (machine.disk, Path("/dev/shm")):
        _run(machine.pid, "-m", f"mount -t tmpfs -o size=2g tmpfs {place}")
    _run(machine.pid, "-u", f"hostname {name}")
    hosts = machine.disk / ".hosts"
    _run(machine.pid, "-m", f"mkdir {machine.disk}/tmp")
    names = "".join(f"{_NETWORK}.{number + 1} machine{number}\\n" for number in range(count))
    _run(machine.pid, "-m", ["sh", "-c", f"printf '127.0.0.1 localhost\\n{names}' > {hosts}"])
    _run(machine.pid, "-m", f"mount --bind {hosts} /etc/hosts")


def _holder(stack: ExitStack, namespaces: Sequence[str]) -> int:
    """Start a process that holds namespaces until the stack ends; return its number. It is the init of its machine."""
    forks = ["-f", "--kill-child"] if "-p" in namespaces else []
    process = subprocess.Popen(["unshare", *namespaces, *forks, "sleep", "infinity"], env=_ENV)
    stack.callback(process.wait)
    stack.callback(process.kill)
    end = time.monotonic() + 10
    while time.monotonic() < end:
        pid = process.pid
        if forks:
            pid = int((Path(f"/proc/{pid}/task/{pid}/children").read_text().split() or ["0"])[0])
        if pid and Path(f"/proc/{pid}/comm").read_text().strip() == "sleep":
            return pid
        time.sleep(0.01)
    raise RuntimeError("unshare made no namespaces within 10 s")


def _run(pid: int, namespace: str, command: str | Sequence[str]) -> None:
    words = command.split() if isinstance(command, str) else command
    subprocess.run(["nsenter", "-t", str(pid), namespace, *words], check=True, env=_ENV)


def start_torchrun(
    order: Sequence[Machine],
    ranks: int,
    port: int,
    folder: Path,
    program: Sequence[str],
    env: Mapping[int, Mapping[str, str]] | None = None,
) -> list["subprocess.Popen[bytes]"]:
    """Start torchrun on each machine, in this order of ranks; what they print goes to `folder`/logN. `env`: further
    variables of a machine, by its number."""
    place = ["--nnodes", str(len(order)), "--nproc-per-node", str(ranks), "--master-addr", order[0].address]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *place, "--master-port", str(port)]
    return [
        machine.start(
            [*torchrun, "--node-rank", str(rank), *program],
            folder / f"log{machine.number}",
            {"PYTHONPATH": ":".join(sys.path), **(env or {}).get(machine.number, {})},
        )
        for rank, machine in enumerate(order)
    ]
