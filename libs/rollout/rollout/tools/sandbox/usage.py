"""Memory, CPU time and number of all processes below a supervisor, by the host's /proc.

The descriptor of that folder is the server's from before it left the host's root; no run has it.
"""

import os
import resource
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")
_COUNTED = ("RssAnon:", "RssShmem:", "VmSwap:")


@dataclass(frozen=True)
class Used:
    """What the processes use together: bytes in memory (a page that two share counts twice), CPU seconds, tasks."""

    memory_bytes: int
    cpu_seconds: float
    tasks: int


class Usage:
    """Reader of what all descendants of this process use. Raises OSError where /proc does not tell its children."""

    def __init__(self, proc: int) -> None:
        self._proc = proc
        self._own = os.readlink("self", dir_fd=proc)
        self._children(self._own)

    def read(self) -> Used:
        """Return what the descendants use now; ended ones that this process has reaped count by their CPU time."""
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        memory, cpu, tasks = 0, ended.ru_utime + ended.ru_stime, 0
        waiting = self._children(self._own)
        while waiting:
            pid = waiting.pop()
            try:
                waiting += self._children(pid)
                words = self._read(f"{pid}/stat").rpartition(")")[2].split()
                status = self._read(f"{pid}/status")
            except (FileNotFoundError, ProcessLookupError):  # it has just ended
                continue
            cpu += sum(map(int, words[11:15])) / _TICKS
            tasks += int(words[17])
            rows = (line.split() for line in status.splitlines() if line.startswith(_COUNTED))
            memory += sum(int(row[1]) << 10 for row in rows)
        return Used(memory, cpu, tasks)

    def _children(self, pid: str) -> list[str]:
        threads = self._list(f"{pid}/task")
        return [child for thread in threads for child in self._read(f"{pid}/task/{thread}/children").split()]

    def _list(self, path: str) -> list[str]:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)

    def _read(self, path: str) -> str:
        file = os.open(path, os.O_RDONLY, dir_fd=self._proc)
        try:
            return os.read(file, 1 << 16).decode("utf-8", "replace")
        finally:
            os.close(file)
