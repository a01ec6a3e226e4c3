"""For tests: files and processes that are left behind."""

import os
import tempfile
import time
from pathlib import Path


def leftover_files() -> set[str]:
    """Return the files that vLLM and its processes make where all processes can see them."""
    shared = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")} if Path("/dev/shm").is_dir() else set()
    mine = Path(tempfile.gettempdir())
    return shared | {str(path) for path in mine.glob("tessera-vllm-*")} | {str(path) for path in mine.glob("vllm*")}


def abandoned(before: set[str], seconds: float = 60) -> set[str]:
    """Return new such files that no living process has mapped; those of others come and go beside a test."""
    limit = time.monotonic() + seconds
    while files := leftover_files() - before - _mapped():
        if time.monotonic() > limit:
            break
        time.sleep(0.5)
    return files


def _mapped() -> set[str]:
    """Return the files of shared memory that any process has mapped."""
    paths = set()
    for path in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = path.read_text().splitlines()
        except OSError:
            continue
        paths |= {line[line.index("/dev/shm/") :] for line in lines if "/dev/shm/" in line}
    return paths


def alive_processes(session: int) -> list[str]:
    """Return the processes of a session that are no zombies."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            pids.append(path.parent.name)
    return pids


def assert_ends(session: int, seconds: float = 60) -> None:
    """Wait until no process of the session is left, for at most `seconds`."""
    limit = time.monotonic() + seconds
    while alive_processes(session):
        assert time.monotonic() < limit, f"{alive_processes(session)} outlived those who started them"
        time.sleep(0.1)


def descendants(pid: int) -> set[int]:
    """Return the ids of all processes below this one."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):
            continue
    found: set[int] = set()
    new = {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found
