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
import socket
import time
from typing import Any, NoReturn

from rollout.tools.sandbox import kernel, namespaces, run, seccomp
from rollout.tools.sandbox.process_limits import apply_limits
from rollout.tools.sandbox.serving import exit_on_error, read_request, serve
from rollout.tools.sandbox.session_server import start_session
from rollout.tools.sandbox.usage import Usage

_LOOK_SECONDS = 0.002  # between two counts of files, in which a program makes a hundred or so
_NICENESS = 5  # niceness of a run whose files are counted
_SERVER_NAMESPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)  # fmt: skip
_RUN_NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC


def main(descriptor: int, packages: list[str], programs: bool) -> NoReturn:
    """Start the server, send on the socket that it is ready (or why not), and wait until it ends.

    With `programs` the host's are visible inside, and sessions can be started.
    """
    channel = socket.socket(fileno=descriptor)
    try:
        run.preload_modules()
        paths = namespaces.visible_paths(packages, programs)
        process = _fork_server(paths, channel, programs)
    except OSError as error:
        channel.send(json.dumps({"refused": str(error)}).encode())
        os._exit(1)
    os.close(channel.detach())
    os.waitpid(process, 0)
    os._exit(0)


def contained(descriptor: int, packages: list[str], image: bool) -> NoReturn:
    """Start the server of sessions as a container's first process; see `main`. `image`: all of its files are shown."""
    channel = socket.socket(fileno=descriptor)
    try:
        run.preload_modules()
        paths = namespaces.visible_in_image(packages) if image else namespaces.visible_paths(packages, True)
    except OSError as error:
        channel.send(json.dumps({"refused": str(error)}).encode())
        os._exit(1)
    _serve_inside(paths, channel, True)


def _fork_server(paths: list[str], channel: socket.socket, programs: bool) -> int:
    """Fork the server's process, map its users from outside, and return its id."""
    left, mapped = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(left[0])
        os.close(mapped[1])
        _become_server(paths, channel, left[1], mapped[0], programs)
    os.close(left[1])
    os.close(mapped[0])
    refused = os.read(left[0], 4096).decode()
    if refused:
        raise OSError(refused)
    namespaces.map_users(child)
    os.write(mapped[1], b".")
    return child


def _become_server(paths: list[str], channel: socket.socket, left: int, mapped: int, programs: bool) -> NoReturn:
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
    _serve_inside(paths, channel, programs)


def _serve_inside(paths: list[str], channel: socket.socket, programs: bool) -> NoReturn:
    """Move into namespaces of the server's own, as root there or in a container, and serve."""
    try:
        kernel.unshare(_SERVER_NAMESPACES)
        process = os.fork()
        if process:
            os.close(channel.detach())
            os.waitpid(process, 0)
            os._exit(0)
        kernel.kill_with_parent()
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY) if programs else -1
        if programs:
            Usage(proc)  # tries it
            _try_bound_of_processes()
        namespaces.move_in(paths, programs)
        folder = namespaces.work_folder(paths)
        _try_confinement(folder)
        channel.send(b'{"ready": true}')
    except OSError as error:
        channel.send(json.dumps({"refused": str(error)}).encode())
        os._exit(1)

    def start(kind: str, *descriptors: int) -> NoReturn:
        if kind == "session":
            request, control = descriptors
            start_session(folder, request, control, proc)
        if programs:
            os.close(proc)
        _start_run(folder, *descriptors)

    serve(channel, start)


def _try_bound_of_processes() -> None:
    """Raise OSError where the kernel does not bound the number of a program's processes, as it does for no program of
    the machine's root: a fork bomb would take the machine."""
    child = os.fork()
    if child == 0:
        with exit_on_error(2):
            kernel.drop_capabilities(namespaces.NOBODY, count_apart=True)
            resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
            try:
                os.fork()
            except BlockingIOError:
                os._exit(0)
        os._exit(1)
    if os.waitpid(child, 0)[1]:
        raise OSError(
            "programs that start others need a bound of their number, and the kernel has none for the machine's root, "
            "the only user here: run as another user, or outside of a container that maps root alone"
        )


def _try_confinement(folder: str) -> None:
    """Try all that a run's confinement asks of the kernel once, so that a refusal is reported at the start."""
    child = os.fork()
    if child == 0:
        with exit_on_error(2):
            kernel.unshare(_RUN_NAMESPACES)
            namespaces.mount_work_folder(folder, 1 << 20, 16)
            kernel.drop_capabilities(namespaces.NOBODY)
            seccomp.install()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise OSError("the kernel refuses a run's own namespaces or its filter (see standard error)")


def _start_run(folder: str, request: int, output: int, report: int) -> NoReturn:
    """Read the request in the run's first process, enter its namespaces, and start its supervisor."""
    requested = read_request(request)
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
    with exit_on_error(1):
        if not descriptors:
            kernel.drop_capabilities(namespaces.NOBODY)
            seccomp.install()
            os._exit(0)
        request, output, report = map(int, descriptors)
        requested = read_request(request)
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
        with exit_on_error(1):
            if files is not None:
                os.nice(_NICENESS)
            apply_limits(requested["limits"], output, {3: result_end}, requested["stdin"])
            if not requested["errors"]:
                os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
            run.execute(requested, 3)
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
