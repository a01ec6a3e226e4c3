"""What `--plan` can check of the machine that it runs on: packages, drivers, devices, ports. It starts nothing
but an interpreter of vLLM's environment, which tells the version of a package.

A plan may be made anywhere, so that nothing here is a problem of the plan: each line says what is there, or what is not
and how it is mended, for whoever starts the run on this machine.
"""

import shutil
import socket
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from apps.common.plan.memory import GIB
from apps.common.plan.work import Work
from engines.devices.detect import devices_of
from engines.devices.hccl import HOST_PORTS, HcclSettings, port_range
from engines.devices.npu_operators import VERSIONS
from rollout.vllm.settings.config import VllmConfig
from rollout.vllm.client.process import find_python
from rollout.vllm.server.ascend import PACKAGE, refuse_other_versions

_INSTALLED = f"""
from importlib.metadata import PackageNotFoundError, version
try:
    print(version({PACKAGE!r}))
except PackageNotFoundError:
    pass
"""
CANN = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")  # set by CANN's set_env.sh


def seen_here(work: Work, environ: Mapping[str, str]) -> list[str]:
    """Return lines on the accelerators that the run asks for; none where it asks for the CPU or leaves the choice
    open."""
    if work.engine.device == "npu":
        operators = work.engine.npu_operators != "off"
        lines = [_torch_npu(operators), _driver(), _cann(environ), *_devices(work), *_ports(work, environ)]
        on_npus = (work.cluster.rollout.engine, work.cluster.rollout.device) == ("vllm", "auto")
        return [*lines, *([_vllm_ascend()] if on_npus else [])]
    return _devices(work) if work.engine.device == "cuda" else []


def _torch_npu(operators: bool) -> str:
    """Return `operators`: whether layers are to compute by those of NPUs."""
    torch = version("torch").partition("+")[0]
    try:
        found = version("torch_npu")
    except PackageNotFoundError:
        return f"missing: torch_npu; install torch_npu=={torch}, the release of the torch that is here"
    if found.partition(".post")[0] != torch:
        return f"missing: torch_npu {found} is not for torch {torch}; install torch_npu=={torch}"
    if operators and not SpecifierSet(VERSIONS).contains(found.partition(".post")[0], prereleases=True):
        return f"missing: torch_npu {VERSIONS} for its operators, {found} is here; set --engine.npu-operators off"
    return f"torch_npu {found} beside torch {torch}"


def _vllm_ascend() -> str:
    """vLLM's plugin in the environment that vLLM has, which an interpreter of it tells without importing either."""
    try:
        python = find_python(VllmConfig())
        asked = subprocess.run([python, "-c", _INSTALLED], capture_output=True, text=True, timeout=60, check=False)
        found = asked.stdout.strip() or None
        refuse_other_versions(found)
    except (ValueError, OSError, subprocess.TimeoutExpired) as error:
        return f"missing: {error}"
    return f"vllm-ascend {found} in the environment of {python}"


def _driver() -> str:
    found = shutil.which("npu-smi")
    return f"driver: {found}" if found else "missing: npu-smi; install driver and firmware of the cards"


def _cann(environ: Mapping[str, str]) -> str:
    found = next((environ[name] for name in CANN if environ.get(name)), None)
    return f"CANN: {found}" if found else f"missing: {CANN[0]} is not set; source set_env.sh of the CANN toolkit"


def _devices(work: Work) -> list[str]:
    kind = work.engine.device
    devices = devices_of(kind)
    if reason := devices.missing():
        return [f"missing: device {kind}; {reason}"]
    count = devices.module.device_count()  # type: ignore[attr-defined]
    lines = [f"{count} devices for {work.processes} ranks a node"]
    if count < work.processes:
        lines = [f"missing: {lines[0]}; set --processes {count}, or take more nodes (--cluster.pools.nodes)"]
    asked, figures = work.cluster.pools.device_memory_gib, devices.memory()
    if asked is not None and figures is not None and figures.total < 0.95 * asked * GIB:
        lines.append(f"missing: a device has {figures.total / GIB:.0f} GiB, the plan counts on {asked:g}")
    return lines


def _ports(work: Work, environ: Mapping[str, str]) -> list[str]:
    """HCCL's settings, and whether the host's ports are free: each rank takes one."""
    try:
        settings = HcclSettings.read(environ)
        settings.check_room(work.processes)
    except ValueError as error:
        return [f"missing: {error}"]
    ports = port_range(HOST_PORTS, settings.host_ports)
    taken = [port for port in ports if not _free(port)]
    line = f"HCCL: {len(ports) - len(taken)} of {len(ports)} host ports are free ({settings.host_ports})"
    if len(ports) - len(taken) < work.processes:
        line = f"missing: {line} for {work.processes} ranks; set {HOST_PORTS} to a range that is"
    return [line, f"HCCL: ranks wait {settings.connect_timeout} s for one another"]


def _free(port: int) -> bool:
    """Return whether a process could take the port; nothing listens on it here."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
