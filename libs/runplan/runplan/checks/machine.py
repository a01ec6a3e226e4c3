"""Checks of the machine that `--plan` runs on: packages, drivers, devices, ports.

It starts nothing but what the sampler asks about its own packages. A plan may be made
anywhere, so that nothing here is a problem of the plan: each line says what is there, or what is missing and how to fix
it before the run is started on this machine.
"""

import os
import shutil
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.specifiers import SpecifierSet

from engines.devices.hccl import HOST_PORTS, HcclSettings, port_range
from runplan.estimates.states import GIB
from runplan.run_spec import RunSpec

HOST_SHARE = 0.5
"""Share of a machine's memory for training on its processors."""
GPU_FILES = ("nvidia*", "dxg", "kfd")
"""Files in /dev of drivers of GPUs: NVIDIA's, Windows' subsystem for Linux, AMD's."""
CANN = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")  # set by CANN's set_env.sh


def device_memory_gib(spec: RunSpec) -> float | None:
    """Return the GiB of memory that a rank may use on this machine; None where its kind of device is not here."""
    if kind_here(spec) == "cpu":
        return HOST_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB / spec.processes
    if spec.engine.device == "cuda" and not _may_have_gpus():
        return None
    from engines.devices.detect import devices_of  # imports torch

    devices = devices_of(spec.engine.device)
    figures = None if devices.missing() else devices.memory()
    return None if figures is None else figures.total / GIB


def kind_here(spec: RunSpec) -> str:
    """Return the kind of device that the run takes on this machine; torch is asked only where there may be a GPU."""
    kind = spec.engine.device
    if kind != "auto":
        return kind
    if not _may_have_gpus():
        return "cpu"
    from engines.devices.detect import devices_of  # imports torch

    return devices_of(kind).kind


def _may_have_gpus() -> bool:
    """Return whether torch has to be asked for CUDA devices: it was, or a driver of GPUs is here."""
    return "torch" in sys.modules or any(path for pattern in GPU_FILES for path in Path("/dev").glob(pattern))


def seen_here(spec: RunSpec, environ: Mapping[str, str]) -> list[str]:
    """Return lines on the accelerators of the run, none where it asks for the CPU, its kind alone where the choice is
    left open; and the lines of the sampler."""
    lines: list[str] = []
    if spec.engine.device == "npu":
        operators = spec.engine.npu_operators != "off"
        lines = [_torch_npu(operators), _driver(), _cann(environ), *_devices(spec), *_ports(spec, environ)]
    elif spec.engine.device == "cuda":
        lines = _devices(spec)
    elif spec.engine.device == "auto":
        lines = [f"device auto: {kind_here(spec)}"]
    return [*lines, *spec.cluster.sampler.seen_here(spec)]


def _torch_npu(operators: bool) -> str:
    """Return the line on torch_npu; `operators`: whether layers are to compute by NPU operators."""
    from engines.devices.npu_operators import VERSIONS  # imports torch

    torch = version("torch").partition("+")[0]
    try:
        installed = version("torch_npu")
    except PackageNotFoundError:
        return f"missing: torch_npu; install torch_npu=={torch}, the release of the torch that is here"
    if installed.partition(".post")[0] != torch:
        return f"missing: torch_npu {installed} is not for torch {torch}; install torch_npu=={torch}"
    if operators and not SpecifierSet(VERSIONS).contains(installed.partition(".post")[0], prereleases=True):
        return f"missing: torch_npu {VERSIONS} for its operators, {installed} is here; set --trainer.npu-operators off"
    return f"torch_npu {installed} beside torch {torch}"


def _driver() -> str:
    program = shutil.which("npu-smi")
    return f"driver: {program}" if program else "missing: npu-smi; install driver and firmware of the cards"


def _cann(environ: Mapping[str, str]) -> str:
    folder = next((environ[name] for name in CANN if environ.get(name)), None)
    return f"CANN: {folder}" if folder else f"missing: {CANN[0]} is not set; source set_env.sh of the CANN toolkit"


def _devices(spec: RunSpec) -> list[str]:
    kind = spec.engine.device
    if kind == "cuda" and not _may_have_gpus():
        return ["missing: device cuda; no driver of a GPU is here"]
    from engines.devices.detect import devices_of  # imports torch

    devices = devices_of(kind)
    if reason := devices.missing():
        return [f"missing: device {kind}; {reason}"]
    count = devices.module.device_count()  # type: ignore[attr-defined]
    lines = [f"{count} devices for {spec.processes} ranks a node"]
    if count < spec.processes:
        lines = [f"missing: {lines[0]}; set --nproc-per-node {count}, or take more nodes (--pools.nodes)"]
    planned, figures = spec.cluster.pools.device_memory_gib, devices.memory()
    if planned is not None and figures is not None and figures.total < 0.95 * planned * GIB:
        lines.append(f"missing: a device has {figures.total / GIB:.0f} GiB, the plan counts on {planned:g}")
    return lines


def _ports(spec: RunSpec, environ: Mapping[str, str]) -> list[str]:
    """Return lines on HCCL's settings and the host's free ports: each rank takes one."""
    try:
        settings = HcclSettings.read(environ)
        settings.check_room(spec.processes)
    except ValueError as error:
        return [f"missing: {error}"]
    ports = port_range(HOST_PORTS, settings.host_ports)
    taken = [port for port in ports if not _free(port)]
    line = f"HCCL: {len(ports) - len(taken)} of {len(ports)} host ports are free ({settings.host_ports})"
    if len(ports) - len(taken) < spec.processes:
        line = f"missing: {line} for {spec.processes} ranks; set {HOST_PORTS} to a range that is"
    return [line, f"HCCL: ranks wait {settings.connect_timeout} s for one another"]


def _free(port: int) -> bool:
    """Return whether a process could take the port: nothing listens on it here."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
