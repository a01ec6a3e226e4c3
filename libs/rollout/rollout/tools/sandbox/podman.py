"""The sandbox's server in a container of podman: the same programs, in an image's files or in those of the host.

The container has no network, a root that is read-only, and of the capabilities those alone by which the server makes
namespaces and changes users; the programs of a model have none of them. Nothing is pulled.
"""

import os
import resource
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollout.tools.sandbox.bubblewrap import OWN_FILES, OWN_FOLDER
from rollout.tools.sandbox.errors import SandboxRefusedError
from rollout.tools.sandbox.namespaces import OWN_PROGRAMS

CAPABILITIES = ("SYS_ADMIN", "SETPCAP", "SETUID", "SETGID", "KILL")
_SOCKET = 3
"""Descriptor of the client's socket in the container: podman passes those from 3 on."""
_MOST = 4096
_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}


def podman_command(
    program: str,
    root: Path,
    packages: Sequence[str],
    paths: Sequence[str],
    files: str,
    image: str | None,
    most: Mapping[str, int],
) -> list[str]:
    """Return the command line of the container. `root` is the folder that holds `rollout`.

    Without an image, `paths` of the host are mounted in `files`, an empty folder whose name is the container's; `most`
    are limits of resources.
    """
    command = [program, "run", "--rm", "--preserve-fds=1", "--network=none", "--log-driver=none", "--pull=never"]
    command += [f"--name={os.path.basename(files)}"]
    command += ["--read-only", "--cap-drop=all", f"--cap-add={','.join(CAPABILITIES)}", f"--tmpfs={OWN_PROGRAMS}"]
    command += [f"--ulimit={name}={value}:{value}" for name, value in most.items()]
    mounted = {f"{OWN_FOLDER}/{file}": str(root / file) for file in OWN_FILES}
    mounted |= {path: path for path in (*(paths if image is None else ()), *packages)}
    command += [f"--volume={os.path.realpath(source)}:{path}:ro" for path, source in mounted.items()]
    interpreter = "python3" if image is not None else os.path.realpath(sys.executable)
    code = f"import sys; sys.path.append({OWN_FOLDER!r}); from rollout.tools.sandbox import server; "
    code += f"server.contained({_SOCKET}, {list(packages)!r}, {image is not None})"
    where = ["--entrypoint=", image] if image is not None else ["--rootfs", os.path.realpath(files)]  # not by a link
    return [*command, *where, interpreter, "-I", "-S", "-c", code]


def with_socket(command: Sequence[str], descriptor: int) -> list[str]:
    """Return the command with this descriptor as the one that the container gets."""
    return ["/bin/bash", "-c", f'exec "$@" {_SOCKET}<&{descriptor}', "bash", *command]


def find_podman() -> str:
    """Return podman's path. Raise SandboxRefusedError where it is not installed."""
    program = shutil.which("podman")
    if program is None:
        raise SandboxRefusedError("podman is not installed")
    return program


def container_limits() -> dict[str, int]:
    """Return limits of the container that this process may set: podman's own are above those of many machines."""
    hard = {name: resource.getrlimit(number)[1] for name, number in _LIMITS.items()}
    return {name: _MOST if most == resource.RLIM_INFINITY else min(most, _MOST) for name, most in hard.items()}
