"""The same confinement by bubblewrap, where only that program may make namespaces (it may be setuid).

Each run is a program of its own here: an interpreter starts inside, becomes the supervisor and forks the run.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rollout.tools.sandbox.namespaces import DEVICES, NOBODY, work_folder

BOUNDING = ("--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP")
"""Capabilities by which process 1 bounds the number of files, then drops. A setuid bwrap gives them to root only."""
OWN_FOLDER = "/server"
"""Path of this library's files inside."""
_FILES = ("rollout/__init__.py", "rollout/tools/__init__.py", "rollout/tools/sandbox/__init__.py")
_MODULES = (
    "bubblewrap", "kernel", "namespaces", "process_limits", "run", "seccomp", "server", "serving", "session_server",
    "usage",
)  # fmt: skip
OWN_FILES = (*_FILES, *(f"rollout/tools/sandbox/{name}.py" for name in _MODULES))
"""Files of this library that a server needs."""


def bubblewrap_command(
    program: str,
    root: Path,
    paths: Sequence[str],
    file_bytes: int,
    capabilities: Sequence[str],
    arguments: Sequence[str],
) -> list[str]:
    """Return the command line of one run. `root` is the folder that holds `rollout`; `paths` are what a run may see.

    `capabilities`: `BOUNDING`, or none.
    """
    command = [program, "--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    command += ["--uid", str(NOBODY), "--gid", str(NOBODY), *capabilities]
    for path in paths:
        command += ["--ro-bind", os.path.realpath(path), path]
        for name in ("site-packages", "dist-packages"):
            if os.path.isdir(f"{path}/{name}"):
                command += ["--tmpfs", f"{path}/{name}", "--remount-ro", f"{path}/{name}"]
    for device in DEVICES:
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for file in OWN_FILES:
        command += ["--ro-bind", os.path.realpath(root / file), f"{OWN_FOLDER}/{file}"]
    folder = work_folder(paths)
    command += ["--size", str(file_bytes), "--tmpfs", folder, "--remount-ro", "/", "--chdir", folder]
    code = (
        f"import sys; sys.path.append({OWN_FOLDER!r}); from rollout.tools.sandbox.server import one; one(*sys.argv[1:])"
    )
    return [*command, "--", os.path.realpath(sys.executable), "-I", "-S", "-c", code, *arguments]
