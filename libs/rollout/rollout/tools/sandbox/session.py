"""Sessions: a shell and a Python that last an episode, with files that stay (`session_server` has its processes).

A command or a cell has limits of its own. All that it leaves in the background ends with the command, and is stopped
after the cell. Files, and a shell's folder and exported variables, stay until the session is closed, a Python's
variables until it ends.
"""

import json
import os
import select
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from rollout.tools.sandbox.backends import Namespaces, Podman
from rollout.tools.sandbox.client_run import GRACE_SECONDS, Limits, Ran
from rollout.tools.sandbox.errors import SandboxDiedError, SandboxRefusedError
from rollout.tools.sandbox.sandbox import written

SESSION_LIMITS = Limits(
    wall_seconds=30, cpu_seconds=30, memory_bytes=1 << 30, file_bytes=128 << 20, files=10_000, descriptors=256, tasks=64
)
"""Limits of a command or a cell; those of files hold for the whole session. `memory_bytes` is that of all processes
together, `tasks` their number, threads counted."""
_FLOOD = 256  # times `output_bytes`, which ends a run; more than `output_bytes` is cut in the middle


class Session(Protocol):
    """A shell and a Python in one working folder. Blocking; a call waits for the one before it."""

    def shell(self, command: str) -> Ran:
        """Run a command by bash to its end."""
        ...

    def python(self, code: str) -> Ran:
        """Run a cell; status and reason are None where the Python lives on, with its variables."""
        ...

    def close(self) -> None:
        """End all processes and remove the files."""
        ...


@dataclass
class SessionSandbox:
    """Opener of sessions, in the kernel's namespaces; `packages` as for `Sandbox`.

    `backend` is "namespaces", "podman" (namespaces of a container's root, where a user may make none) or "auto": the
    first that the machine allows. bubblewrap has no sessions: it makes a root for each program. `image` is one that
    podman has, with bash, and Python 3.11 or newer as python3; without it programs are those of the host.
    """

    limits: Limits = SESSION_LIMITS
    packages: Sequence[str] = ()
    backend: str = "auto"
    image: str | None = None
    _server: Namespaces | Podman | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.backend not in ("auto", "namespaces", "podman"):
            raise ValueError(f"backend must be auto, namespaces or podman, got {self.backend!r}")
        if self.image is not None and self.backend != "podman":
            raise ValueError(f"image {self.image!r} is one of podman: give backend='podman' too")
        self._lock = threading.Lock()

    def start(self) -> Namespaces | Podman:
        """Start the server. Raise SandboxRefusedError where the kernel refuses, or bash is not installed."""
        with self._lock:
            if self._server is None:
                if not os.path.exists("/bin/bash"):
                    raise SandboxRefusedError("a shell for a model needs /bin/bash, which is not installed")
                self._server = self._started()
            return self._server

    def _started(self) -> Namespaces | Podman:
        refused = []
        if self.backend != "podman":
            try:
                return Namespaces(self.packages, programs=True)
            except SandboxRefusedError as error:
                refused.append(str(error))
        if self.backend != "namespaces":
            try:
                return Podman(self.packages, self.image)
            except SandboxRefusedError as error:
                refused.append(f"podman: {error}")
        raise SandboxRefusedError("; ".join(refused))

    def open(self) -> "NamespaceSession":
        """Return a new session. Raise SandboxRefusedError or SandboxDiedError where that fails."""
        server = self.start()
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = written({"limits": asdict(self.limits)})
        try:
            server.open_session(request, theirs.fileno())
        except SandboxDiedError:
            mine.close()
            self.close()
            raise
        finally:
            os.close(request)
            theirs.close()
        return NamespaceSession(self.limits, list(self.packages), mine)

    def close(self) -> None:
        """End the server and all sessions. The next one starts a new server."""
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None


class NamespaceSession:
    """A session of a SessionSandbox."""

    def __init__(self, limits: Limits, packages: list[str], channel: socket.socket) -> None:
        self._limits, self._packages, self._channel = limits, packages, channel
        self._lock = threading.Lock()
        self._state = ""
        self._python: _Conversation | None = None

    def shell(self, command: str) -> Ran:
        """Run a command by bash to its end, in the folder and with the variables that the one before it left.

        Raises SandboxDiedError where that fails.
        """
        if "\0" in command:
            return Ran("bash: a command can't hold the character NUL\n", 2)
        with self._lock:
            program = self._begin("shell", {"texts": [self._state, command]})
            try:
                ran, told = program.answer()
            finally:
                program.close()
        self._state = told.get("state", self._state)
        return ran

    def python(self, code: str) -> Ran:
        """Run a cell of Python; start the Python where there is none. Raise SandboxDiedError where that fails."""
        cell = code.encode("utf-8", "backslashreplace") or b"\n"
        with self._lock:
            if self._python is None:
                self._python = self._begin("python", {"packages": self._packages})
            lives = False
            try:
                self._python.send(len(cell).to_bytes(8) + cell)
                ran, told = self._python.answer()
                lives = told.get("lives", False)
            finally:
                if not lives:
                    self._python.close()
                    self._python = None
        return ran

    def close(self) -> None:
        """End all processes and remove the files."""
        self._channel.close()
        if self._python is not None:
            self._python.close()
            self._python = None

    def _begin(self, kind: str, request: Mapping[str, Any]) -> "_Conversation":
        program = _Conversation(self._limits)
        descriptor = written(request)
        try:
            socket.send_fds(self._channel, [kind.encode()], [descriptor, *program.ends])
        except OSError as error:
            program.close()
            raise SandboxDiedError(f"the session is gone: {error}") from error
        finally:
            os.close(descriptor)
            for end in program.ends:
                os.close(end)
        return program


class _Conversation:
    """The client's ends of a program: the pipe that it prints to, and the socket of its supervisor, its lifeline."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._output, output = os.pipe()
        self._report, report = socket.socketpair()
        self.ends = (output, report.detach())

    def close(self) -> None:
        """Let the program go: its supervisor ends it."""
        if self._output >= 0:
            os.close(self._output)
        self._output = -1
        self._report.close()

    def send(self, data: bytes) -> None:
        """Send a cell."""
        self._report.settimeout(GRACE_SECONDS)
        try:
            self._report.sendall(data)
        except OSError as error:
            raise SandboxDiedError(f"the session's supervisor is gone: {error}") from error

    def answer(self) -> tuple[Ran, dict[str, Any]]:
        """Read until the supervisor reports an end; return it, and the whole report (nothing of a flood).

        Raises SandboxDiedError where none comes.
        """
        printed, told = _Printed(self._limits.output_bytes), b""
        given_up = time.monotonic() + self._limits.wall_seconds + GRACE_SECONDS
        poll = select.poll()
        poll.register(self._output, select.POLLIN)
        poll.register(self._report, select.POLLIN)
        while not told.endswith(b"\n"):
            if time.monotonic() > given_up:
                raise SandboxDiedError("the session does not answer")
            ready = dict(poll.poll(1000))
            if self._output in ready and not self._print(printed):
                poll.unregister(self._output)
            if printed.bytes > _FLOOD * self._limits.output_bytes:
                return Ran(printed.text(), None, "output"), {}
            if self._report.fileno() in ready:
                chunk = self._told()
                if not chunk:
                    raise SandboxDiedError("a program ended without a report")
                told += chunk
        while dict(self._waiting(self._output)) and self._print(printed):
            pass
        report: dict[str, Any] = json.loads(told)
        times = report["cpu_seconds"], report["wall_seconds"]
        return Ran(printed.text(), report["status"], report["reason"], (), *times), report

    def _print(self, printed: "_Printed") -> bool:
        chunk = os.read(self._output, 1 << 16)
        printed.add(chunk)
        return bool(chunk)

    def _told(self) -> bytes:
        try:
            return self._report.recv(1 << 16)
        except ConnectionResetError:
            return b""

    @staticmethod
    def _waiting(descriptor: int) -> list[tuple[int, int]]:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        return poll.poll(0)


class _Printed:
    """Output of which the first and the last bytes are kept, each half of `most`."""

    def __init__(self, most: int) -> None:
        self._half = most // 2
        self._head, self._tail = b"", b""
        self.bytes = 0

    def add(self, chunk: bytes) -> None:
        """Keep what belongs to the head or may belong to the tail."""
        self.bytes += len(chunk)
        missing = self._half - len(self._head)
        self._head += chunk[:missing]
        self._tail = (self._tail + chunk[missing:])[-self._half :]

    def text(self) -> str:
        """Return head and tail, and between them how much was cut."""
        cut = self.bytes - len(self._head) - len(self._tail)
        between = f"\n[{cut} bytes cut]\n".encode() if cut else b""
        return (self._head + between + self._tail).decode("utf-8", "replace")
