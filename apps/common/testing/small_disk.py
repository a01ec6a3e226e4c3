"""A command on a disk of few bytes: a file system of its own in a namespace of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

_MOUNTS = ["unshare", "--user", "--map-root-user", "--mount"]


def has_namespaces() -> bool:
    """Return whether this machine lets a process mount in a namespace of its own."""
    return (
        shutil.which("unshare") is not None
        and not subprocess.run([*_MOUNTS, "true"], check=False, stderr=subprocess.DEVNULL).returncode
    )


def run_on_small_disk(folder: Path, size: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script with a file system of so many bytes on DISK, and PYTHON for this interpreter."""
    disk = folder / "disk"
    disk.mkdir()
    mounted = f"mount -t tmpfs -o size={size} tmpfs {disk} && {script}"
    command = [*_MOUNTS, "sh", "-c", mounted.replace("DISK", str(disk)).replace("PYTHON", sys.executable)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def assert_one_line(done: subprocess.CompletedProcess[str], folder: Path, what: str, then: str) -> None:
    """Assert that a run ended with one line: which disk is full, what was written, and how the run goes on."""
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"error: no space is left on the disk of {folder}/disk")
    assert f": {what}" in lines[0]
    assert then.replace("DISK", f"{folder}/disk") in lines[0]
