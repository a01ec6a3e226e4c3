"""The sandbox's server: a small Python that forks a confined process for each run. It never runs a model's code itself.

    client -> launcher: maps the user ids of the server                 (this program, started by the client)
      -> server: process 1 of its own namespaces; its root has very few files, its environment is empty
        -> for each run: process, mount and network namespaces of its own
          -> supervisor: process 1 there; watches the clock and the client; when it ends, the kernel ends all inside
            -> run: user nobody, no capability, limits, the filter; it alone executes the model's code

The client and the server use one socket: a datagram is a run, with three descriptors (request to read, output and
report to write). The report's other end is the run's lifeline: when the client closes it, the supervisor ends.
Standard library alone, `python -I -S`; nothing of this is in the client's process.
"""

import contextlib
import json
import os
import resource
import select
import signal
import socket
import time
from typing import Any, NoReturn

from rollout.tools.sandbox import kernel, namespaces, run, seccomp

REQUEST_BYTES = 16 << 20
_LOOK_SECONDS = 0.002  # between two counts of files, in which a program makes a hundred or so
_NICENESS = 5  # niceness of a run whose files are counted
_SERVER_NAMESPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)  # fmt: skip
_RUN_NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC


def main(descriptor: int, packages: list[str]) -> NoReturn:
    """Start the server, send on the socket that it is ready (or why not), and wait until it ends."""
    channel = socket.socket(fileno=descriptor)
    try:
        run.preload_modules()
        paths = namespaces.visible_paths(packages)
        process = _fork_server(paths, channel)
    except OSError as error:
        channel.send(json.dumps({"refused": str(error)}).encode())
        os._exit(1)
    os.close(channel.detach())
    os.waitpid(process, 0)
    os._exit(0)


def _fork_server(paths: list[str], channel: socket.socket) -> int:
    """Fork the server's process, map its users from outside, and return its id."""
    left, mapped = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(left[0])
        os.close(mapped[1])
        _become_server(paths, channel, left[1], mapped[0])
    os.close(left[1])
    os.close(mapped[0])
    refused = os.read(left[0], 4096).decode()
    if refused:
        raise OSError(refused)
    namespaces.map_users(child)
    os.write(mapped[1], b".")
    return child


def _become_server(paths: list[str], channel: socket.socket, left: int, mapped: int) -> NoReturn:
    """Move into the namespaces and serve. `left` is closed (or gets the reason why not) once the user namespace is
    left; `mapped` says when the users are mapped."""
    try:
        kernel.kill_with_parent()
        kernel.unshare(kernel.CLONE_NEWUSER)
    except OSError as error:
        os.write(left, f"user namespaces: {error}".encode())
        os._exit(1)
    os.close(left)
    if os.read(mapped, 1) != b".":
        os._exit(1)
    try:
        kernel.unshare(_SERVER_NAMESPACES)
        process = os.fork()
        if process:
            os.close(channel.detach())
            os.waitpid(process, 0)
            os._exit(0)
        kernel.kill_with_parent()
        namespaces.move_in(paths)
        folder = namespaces.work_folder(paths)
        _try_confinement(folder)
        channel.send(b'{"ready": true}')
    except OSError as error:
        channel.send(json.dumps({"refused": str(error)}).encode())
        os._exit(1)
    _serve(channel, folder)


def _try_confinement(folder: str) -> None:
    """Try all that a run's confinement asks of the kernel once, so that a refusal is reported at the start."""
    child = os.fork()
    if child == 0:
        with _exit_on_error(2):
            kernel.unshare(_RUN_NAMESPACES)
            namespaces.mount_work_folder(folder, 1 << 20, 16)
            kernel.drop_capabilities(namespaces.NOBODY)
            seccomp.install()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise OSError("the kernel refuses a run's own namespaces or its filter (see standard error)")


@contextlib.contextmanager
def _exit_on_error(status: int) -> Any:
    try:
        yield
    except OSError as error:
        os.write(2, f"sandbox: {error}\n".encode())
        os._exit(status)


def _serve(channel: socket.socket, folder: str) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the runs' processes
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 64, 3)
        if not message:
            os._exit(0)  # the client is gone; with process 1, all namespaces end
        if os.fork() == 0:
            with _exit_on_error(1):
                os.close(channel.detach())
                _start_run(folder, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _start_run(folder: str, request: int, output: int, report: int) -> NoReturn:
    """Read the request in the run's first process, enter its namespaces, and start its supervisor."""
    with open(request, "rb") as file:
        requested = json.loads(file.read(REQUEST_BYTES))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kernel.unshare(_RUN_NAMESPACES)
    if os.fork():
        os._exit(0)
    namespaces.mount_work_folder(folder, requested["limits"]["file_bytes"], requested["limits"]["files"])
    watch(requested, output, report)


def one(*descriptors: str) -> NoReturn:
    """Run one program as process 1 of namespaces that another program has made.

    Without descriptors it only tries what a run's confinement asks of the kernel.
    """
    run.preload_modules()
    with _exit_on_error(1):
        if not descriptors:
            kernel.drop_capabilities(namespaces.NOBODY)
            seccomp.install()
            os._exit(0)
        request, output, report = map(int, descriptors)
        with open(request, "rb") as file:
            requested = json.loads(file.read(REQUEST_BYTES))
        limits = requested["limits"]
        is_bounded = namespaces.bound_files(limits["file_bytes"], limits["files"])
        kernel.drop_capabilities(namespaces.NOBODY)
        watch(requested, output, report, None if is_bounded else limits["files"])


def watch(requested: dict[str, Any], output: int, report: int, files: int | None = None) -> NoReturn:
    """Run as process 1: fork the run, wait for its end, its time limit or the client's close, and report.

    Ending this process ends all that the run left behind. `files`: end a run that has more of them in its folder, which
    is a file system of its own (None: the kernel bounds them).
    """
    result, result_end = os.pipe()
    began = time.monotonic()
    child = os.fork()
    if child == 0:
        with _exit_on_error(1):
            if files is not None:
                os.nice(_NICENESS)
            apply_limits(requested["limits"], requested["stdin"], output, result_end)
            if not requested["errors"]:
                os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
            run.execute(requested, result_end)
    os.close(result_end)
    os.close(output)
    deadline = began + requested["limits"]["wall_seconds"]
    reason, status, value = _await_end(child, deadline, report, result, requested["limits"]["output_bytes"], files)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = {
        "reason": reason,
        "status": os.waitstatus_to_exitcode(status) if status is not None else None,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "wall_seconds": time.monotonic() - began,
        "result": value.decode("utf-8", "replace"),
    }
    with contextlib.suppress(OSError):
        os.write(report, json.dumps(ended).encode() + b"\n")
    os._exit(0)


def _await_end(
    child: int, deadline: float, report: int, result: int, most: int, files: int | None
) -> tuple[str | None, int | None, bytes]:
    """Wait for the end of a run; return why it was ended (None: it ended itself), its exit status, and its result."""
    look = float("inf") if files is None else _LOOK_SECONDS
    handle = os.pidfd_open(child)
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(result, select.POLLIN)
    poll.register(report, 0)  # hang-up only: the client closed the lifeline
    value = b""
    while True:
        events = dict(poll.poll(max(0.0, min(look, deadline - time.monotonic())) * 1000))
        if report in events:
            os._exit(0)
        if files is not None and _files_here() > files:
            return "files", None, b""
        if events.get(result, 0):
            chunk = os.read(result, 1 << 16)
            value += chunk
            if not chunk:
                poll.unregister(result)
            if len(value) > most:
                return "output", None, b""
            continue
        if handle in events:
            return None, os.waitpid(child, 0)[1], value
        if time.monotonic() >= deadline:
            return "wall time", None, value


def _files_here() -> int:
    """Count the files of the working folder's file system, the folder and open files without a name included."""
    stats = os.statvfs(".")
    return stats.f_files - stats.f_ffree


def apply_limits(limits: dict[str, Any], given: str, output: int, result: int) -> None:
    """Set this process's limits: user nobody, no capabilities, resource limits, the filter.

    Its standard input holds `given`; of other descriptors it keeps `output` (as 1 and 2) and `result`.
    """
    os.setsid()
    with open(".input", "w+b") as file:
        file.write(given.encode("utf-8", "backslashreplace"))
        file.seek(0)
        os.unlink(file.name)
        os.dup2(file.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, result)
    os.closerange(result + 1, 1 << 16)
    kernel.drop_capabilities(namespaces.NOBODY, count_apart=True)
    for name, most in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["descriptors"]),
        (resource.RLIMIT_NPROC, limits["tasks"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
    ):
        resource.setrlimit(name, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu_seconds"], limits["cpu_seconds"] + 1))
    seccomp.install()
