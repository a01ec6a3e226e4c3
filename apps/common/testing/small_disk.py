"""Programs on a disk of few bytes: a file system of its own in a namespace of its own.

They are forked children of a test, which has imported what they need.
"""

import ctypes
import multiprocessing.forkserver
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from apps.common.testing.process_kills import redirect_output, run_in_child

_UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]
_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000  # <linux/sched.h>
_REMOUNT, _PRIVATE_BELOW = 1 << 5, 1 << 14 | 1 << 18  # <linux/mount.h>


def has_namespaces() -> bool:
    """Return whether this machine lets a process mount in a namespace of its own."""
    return (
        shutil.which("unshare") is not None
        and not subprocess.run([*_UNSHARE, "true"], check=False, stderr=subprocess.DEVNULL).returncode
    )


def run_on_small_disk(folder: Path, size: str, *programs: Callable[[], Any]) -> subprocess.CompletedProcess[str]:
    """Run programs, one after the other, with a file system of so many bytes on `folder / "disk"`.

    Returns:
        The exit status of the last one, and what all wrote.
    """
    (folder / "disk").mkdir()
    status = run_in_child(_on_disk, folder, size, programs)
    return subprocess.CompletedProcess([], status, *((folder / name).read_text() for name in ("stdout", "stderr")))


def resized(folder: Path, size: str) -> Callable[[], None]:
    """Return a program that gives the disk another size."""
    return partial(_mount, folder / "disk", _REMOUNT, f"size={size}")


def _on_disk(folder: Path, size: str, programs: tuple[Callable[[], Any], ...]) -> None:
    """Run each program in a child of its own, where the disk is mounted; end with the status of the last."""
    user, group = os.getuid(), os.getgid()
    _checked(_LIBC.unshare(_NEW_USER | _NEW_MOUNTS))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path("/proc/self", name).write_text(text)
    _mount(Path("/"), _PRIVATE_BELOW)
    _mount(folder / "disk", 0, f"size={size}")
    redirect_output(folder)
    # A server of processes that runs already is outside of the namespace: ranks come from one that is started in it.
    multiprocessing.forkserver._forkserver._forkserver_address = None  # type: ignore[attr-defined]
    statuses = [run_in_child(program) for program in programs]
    sys.exit(statuses[-1])


_LIBC = ctypes.CDLL(None, use_errno=True)


def _mount(place: Path, flags: int, options: str = "") -> None:
    _checked(_LIBC.mount(b"tmpfs", os.fsencode(place), b"tmpfs", ctypes.c_ulong(flags), options.encode()))


def _checked(status: int) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def assert_one_line(done: subprocess.CompletedProcess[str], folder: Path, what: str, then: str) -> None:
    """Assert that a run ended with one line: which disk is full, what was written, and how the run goes on."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"error: no space is left on the disk of {folder}/disk")
    assert f": {what}" in lines[0], lines[0]
    assert then.replace("DISK", f"{folder}/disk") in lines[0]
