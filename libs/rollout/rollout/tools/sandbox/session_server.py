"""The server's side of a session: programs that start processes, in a working folder that lasts.

    server -> session: process 1 of namespaces of its own, with the working folder
      -> for each program: a process namespace of its own
        -> supervisor: process 1 there; watches time, memory and the client; when it ends, all inside ends
          -> bash, or a Python that reads one cell after the other

The processes of a program are held together: by the number of tasks that the kernel allows, and by a look at their
memory and CPU time every `_LOOK_SECONDS`. Those of a Python are stopped between two cells.
"""

import contextlib
import json
import os
import select
import signal
import socket
import time
from typing import Any, NoReturn

from rollout.tools.sandbox import kernel, namespaces, run
from rollout.tools.sandbox.process_limits import apply_limits
from rollout.tools.sandbox.serving import exit_on_error, read_request, serve
from rollout.tools.sandbox.usage import Usage

_LOOK_SECONDS = 0.02
_STATE_BYTES = 64 << 10  # of a shell's variables and folder
_NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
_SHELL = """IFS= read -r -d '' state <&4; IFS= read -r -d '' command <&4; exec 4<&-
eval "$state"; unset state
trap 'status=$?; { echo "cd $(printf %q "$PWD")"; export -p; } >&3 2>/dev/null; exit $status' EXIT
eval "$command"
"""


def start_session(folder: str, request: int, control: int, proc: int) -> NoReturn:
    """Serve the programs of a session, in its namespaces and working folder, until the client closes it."""
    limits = read_request(request)["limits"]
    kernel.unshare(_NAMESPACES)
    if os.fork():
        os._exit(0)
    namespaces.mount_work_folder(folder, limits["file_bytes"], limits["files"])

    def start(kind: str, request: int, output: int, report: int) -> NoReturn:
        kernel.unshare(kernel.CLONE_NEWPID)
        if os.fork():
            os._exit(0)
        requested = read_request(request)
        usage = Usage(proc)
        if kind == "shell":
            _run_shell(requested, output, report, limits, usage)
        _run_python(requested, output, report, limits, usage)

    serve(socket.socket(fileno=control), start)


def _run_shell(requested: dict[str, Any], output: int, report: int, limits: dict[str, Any], usage: Usage) -> NoReturn:
    """Run bash as process 1's child, on a command and the state that the one before it left; report its end."""
    script = os.memfd_create("script")
    with open(os.dup(script), "wb") as file:
        file.write(b"".join(text.encode("utf-8", "backslashreplace") + b"\0" for text in requested["texts"]))
    os.lseek(script, 0, os.SEEK_SET)
    result, result_end = os.pipe()
    child = os.fork()
    if child == 0:
        with exit_on_error(126):
            apply_limits(limits, output, {3: result_end, 4: script}, processes=True)
            work = os.getcwd()
            environment = {**run.ENVIRONMENT, "PATH": namespaces.PATH, "HOME": work, "TMPDIR": work, "PWD": work}
            os.execve("/bin/bash", ["bash", "--noprofile", "--norc", "-c", _SHELL], environment)
    for descriptor in (output, result_end, script):
        os.close(descriptor)
    watched = _Watched(child, report, result, limits, usage)
    ended = watched.until_end()
    if ended["reason"] is None and len(watched.said) <= _STATE_BYTES:
        ended["state"] = watched.said.decode("utf-8", "replace")
    _send(report, ended)
    os._exit(0)


def _run_python(requested: dict[str, Any], output: int, report: int, limits: dict[str, Any], usage: Usage) -> NoReturn:
    """Run a Python as process 1's child: give it the client's cells and report the end of each."""
    result, result_end = os.pipe()
    cells_end, cells = os.pipe()
    child = os.fork()
    if child == 0:
        with exit_on_error(126):
            apply_limits(limits, output, {3: result_end, 4: cells_end}, processes=True)
            run.execute_cells(requested["packages"], cells=4, result=3)
    for descriptor in (output, result_end, cells_end):
        os.close(descriptor)
    os.set_blocking(cells, False)
    while True:
        size = int.from_bytes(_receive(report, 8))
        cell = size.to_bytes(8) + _receive(report, size)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGCONT)
        ended = _Watched(child, report, result, limits, usage).until_line(cells, cell)
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)
        ended["lives"] = ended["reason"] is None and ended["status"] is None
        _send(report, ended)
        if not ended["lives"]:
            os._exit(0)


def _receive(report: int, size: int) -> bytes:
    """Read this many bytes; end with the client."""
    data = b""
    while len(data) < size:
        chunk = os.read(report, min(size - len(data), 1 << 16))
        if not chunk:
            os._exit(0)
        data += chunk
    return data


def _send(report: int, ended: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        os.write(report, json.dumps(ended).encode() + b"\n")


class _Watched:
    """A child on its way to its end or that of a cell, within its limits."""

    def __init__(self, child: int, report: int, result: int, limits: dict[str, Any], usage: Usage) -> None:
        self._child, self._report, self._result, self._limits, self._usage = child, report, result, limits, usage
        self._began, self._cpu_before = time.monotonic(), usage.read().cpu_seconds
        self._cpu = 0.0
        self._poll = select.poll()
        self._handle = os.pidfd_open(child)
        self._poll.register(self._handle, select.POLLIN)
        self._poll.register(result, select.POLLIN)
        self._poll.register(report, 0)  # hang-up only: the client let it go
        self.said = b""

    def until_end(self) -> dict[str, Any]:
        """Wait until the child has ended; what it says as its result is in `said`."""
        while True:
            events = self._look()
            reason, status = self._exceeded(), self._reaped()
            if status is not None or reason is not None:
                if status is not None:  # what it wrote before is there already
                    self._read_result(self._look(0))
                return self._ended(reason if status is None else None, status)
            self._read_result(events)

    def until_line(self, cells: int, cell: bytes) -> dict[str, Any]:
        """Give the child a cell, and wait for a line of its result, or for its end."""
        self._poll.register(cells, select.POLLOUT)
        while True:
            events = self._look()
            if cell and events.get(cells, 0):
                with contextlib.suppress(BrokenPipeError):  # it has ended, or closed the pipe: seen below
                    cell = cell[os.write(cells, cell[: 1 << 16]) :]
                if not cell or events[cells] & select.POLLERR:
                    cell = b""
                    self._poll.unregister(cells)
            self._read_result(events)
            reason, status = self._exceeded(), self._reaped()
            if reason is not None or status is not None or b"\n" in self.said:
                return self._ended(None if b"\n" in self.said else reason, status)

    def _look(self, seconds: float = _LOOK_SECONDS) -> dict[int, int]:
        events = dict(self._poll.poll(seconds * 1000))
        if self._report in events:
            os._exit(0)
        return events

    def _read_result(self, events: dict[int, int]) -> None:
        if events.get(self._result, 0):
            chunk = os.read(self._result, 1 << 16)
            self.said = (self.said + chunk)[: _STATE_BYTES + 1]
            if not chunk:
                self._poll.unregister(self._result)

    def _exceeded(self) -> str | None:
        """Return the limit that the processes have passed, or None."""
        used = self._usage.read()
        self._cpu = used.cpu_seconds - self._cpu_before
        if used.memory_bytes > self._limits["memory_bytes"]:
            return "memory"
        if self._cpu > self._limits["cpu_seconds"]:
            return "CPU time"
        return "wall time" if time.monotonic() - self._began > self._limits["wall_seconds"] else None

    def _reaped(self) -> int | None:
        """Return the child's exit status (None while it lives), and wait for all others that have ended."""
        status = None
        while True:
            try:
                pid, code = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return status
            if pid == 0:
                return status
            if pid == self._child:
                status = os.waitstatus_to_exitcode(code)

    def _ended(self, reason: str | None, status: int | None) -> dict[str, Any]:
        os.close(self._handle)
        seconds = time.monotonic() - self._began
        return {"reason": reason, "status": status, "cpu_seconds": self._cpu, "wall_seconds": seconds}
