"""What a run's process gives up before it executes code: descriptors, its user, capabilities, system calls."""

import fcntl
import os
import resource
from collections.abc import Mapping
from typing import Any

from rollout.tools.sandbox import kernel, namespaces, seccomp

_HIGH = 100  # above all descriptors that are kept


def apply_limits(
    limits: Mapping[str, Any],
    output: int,
    kept: Mapping[int, int],
    given: str | None = None,
    processes: bool = False,
) -> None:
    """Set this process's limits: user nobody, no capabilities, resource limits, the filter.

    Its standard input holds `given` (None: nothing); of other descriptors it keeps `output`, as 1 and 2, and those of
    `kept`, by the numbers that they get. With `processes` it may start others, and its supervisor counts their time.
    """
    os.setsid()
    moved = {number: fcntl.fcntl(kept[number], fcntl.F_DUPFD, _HIGH) for number in kept}
    _open_input(given)
    os.dup2(output, 1)
    os.dup2(output, 2)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
    os.closerange(3 + len(moved), 1 << 16)
    kernel.drop_capabilities(namespaces.NOBODY, count_apart=True)
    bounds = [
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["descriptors"]),
        (resource.RLIMIT_NPROC, limits["tasks"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ]
    for name, most in bounds:
        resource.setrlimit(name, (most, most))
    if not processes:
        resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_seconds"], limits["cpu_seconds"] + 1))
    seccomp.install(processes)


def _open_input(given: str | None) -> None:
    if given is None:
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        return
    with open(".input", "w+b") as file:
        file.write(given.encode("utf-8", "backslashreplace"))
        file.seek(0)
        os.unlink(file.name)
        os.dup2(file.fileno(), 0)
