"""Runs of a model's Python code, in a sandbox made by the kernel: see `server` for its processes and `namespaces` for
what they can see.

`Sandbox` starts its server at the first run, and again where it has died; it refuses to start, with the reason, where
the kernel refuses (`SandboxRefusedError`): nothing is ever run with less confinement.
"""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from rollout.tools.sandbox.bubblewrap import BOUNDING, bubblewrap_command

_ROOT = Path(__file__).parents[3]  # the folder that holds `rollout`
_START_SECONDS = 30.0
_GRACE_SECONDS = 10.0  # past the wall-clock limit, before the server itself counts as dead


class SandboxRefusedError(RuntimeError):
    """The kernel refuses a part of the sandbox, so nothing is run. The text says which."""


@dataclass(frozen=True)
class Limits:
    """Limits of a run. Sizes are in bytes.

    `memory_bytes` is the address space of its one process (threads share it; there is no other process), `file_bytes`
    the size of all its files together, which are in memory too, `files` their number. `output_bytes` bounds what it
    prints, and its results, each. `tasks` bounds the run's threads (with a setuid bubblewrap those
    of all runs together; not where the machine's root is the only user, as in a namespace that maps it alone).
    """

    wall_seconds: float = 10.0
    cpu_seconds: int = 5
    memory_bytes: int = 512 << 20
    output_bytes: int = 64 << 10
    file_bytes: int = 16 << 20
    files: int = 256
    descriptors: int = 64
    tasks: int = 256

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ValueError(f"the limit {name} must be more than 0, got {value}")
        if self.memory_bytes < 128 << 20:
            raise ValueError(f"memory_bytes must be at least {128 << 20}: the interpreter itself needs that")


@dataclass(frozen=True)
class Ran:
    """The end of a run.

    `status` is the exit status, negative for a signal, None where the sandbox ended the run. `reason` is the limit that
    ended it ("wall time", "CPU time", "output" or "files"), if any. `output` is what it printed (standard error too,
    cut at the limit), `results` the values of the evaluated expressions (`run.encoded`).
    """

    output: str
    status: int | None
    reason: str | None = None
    results: tuple[Any, ...] = ()
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with status 0."""
        return self.status == 0 and self.reason is None


@dataclass(frozen=True)
class Program:
    """The code of a run, with its standard input; then the expressions whose values it returns.

    `errors` says whether standard error is a part of the output.
    """

    code: str
    stdin: str = ""
    expressions: tuple[str, ...] = ()
    errors: bool = True


class SandboxDiedError(RuntimeError):
    """The sandbox's server was lost (the machine ran out of memory, or it was killed): the run may be tried again."""


class _Backend(Protocol):
    def start(self, request: int, output: int, report: int) -> None: ...

    def close(self) -> str: ...


@dataclass
class Sandbox:
    """Runner of programs side by side, each in namespaces of its own. Blocking, and safe to use from several threads.

    `packages` are folders of modules that runs may import, mounted read-only. `max_runs` bounds the runs at a time of
    one call. `backend` is "namespaces" (the kernel's, without any program), "bubblewrap" (where only that program may
    make namespaces; slower, since each run starts an interpreter; where it gives no right to bound the number of files,
    as a setuid one, they are counted every 2 ms, and too many end the run) or "auto": the first that the kernel allows.
    """

    limits: Limits = field(default_factory=Limits)
    packages: Sequence[str] = ()
    max_runs: int = 16
    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.backend not in ("auto", "namespaces", "bubblewrap"):
            raise ValueError(f"backend must be auto, namespaces or bubblewrap, got {self.backend!r}")
        if self.max_runs < 1:
            raise ValueError(f"max_runs must be at least 1, got {self.max_runs}")
        for path in self.packages:
            if not os.path.isdir(path):
                raise ValueError(f"packages: {path} is no folder")
            if os.stat(path).st_mode & 0o5 != 0o5:
                raise ValueError(f"packages: {path} can't be read by nobody, which is who runs are: chmod o+rx {path}")
        self._lock = threading.Lock()
        self._server: _Backend | None = None

    def start(self) -> None:
        """Start the server now rather than at the first run. Raise SandboxRefusedError where the kernel refuses."""
        with self._lock:
            if self._server is None:
                self._server = self._started()

    def close(self) -> None:
        """End the server and all runs. The next run starts a new one."""
        with self._lock:
            if self._server is not None:
                self._server.close()
                self._server = None

    def run(self, code: str, stdin: str = "", expressions: Sequence[str] = ()) -> Ran:
        """Run one program to its end. Raise SandboxRefusedError or SandboxDiedError where that fails."""
        return self.run_all([Program(code, stdin, tuple(expressions))])[0]

    def run_all(self, programs: Sequence[Program]) -> list[Ran]:
        """Run programs side by side, at most `max_runs` at a time; return their ends in the same order."""
        self.start()
        waiting = deque(enumerate(programs))
        running: dict[int, _Run] = {}
        ended: dict[int, Ran] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.max_runs:
                    index, program = waiting.popleft()
                    running[index] = self._begin(program)
                _read_ready(running.values())
                for index in [i for i, r in running.items() if r.is_over]:
                    ended[index] = running.pop(index).outcome()
        except SandboxDiedError:
            self.close()
            raise
        finally:
            for run in running.values():
                run.release()
        return [ended[i] for i in range(len(programs))]

    def _begin(self, program: Program) -> "_Run":
        request_fields = {**asdict(program), "limits": asdict(self.limits), "packages": list(self.packages)}
        run = _Run(self.limits)
        request = os.memfd_create("request")
        try:
            with open(os.dup(request), "wb") as file:
                file.write(json.dumps(request_fields).encode())
            os.lseek(request, 0, os.SEEK_SET)
            server = self._server
            if server is None:  # closed meanwhile, by another thread
                raise SandboxDiedError("the sandbox was closed while it was in use")
            server.start(request, *run.ends)
        except BaseException:
            run.release()
            raise
        finally:
            os.close(request)
            run.close_ends()
        return run

    def _started(self) -> _Backend:
        refused = []
        if self.backend != "bubblewrap":
            try:
                return _Namespaces(self.packages)
            except SandboxRefusedError as error:
                refused.append(f"namespaces: {error}")
        if self.backend != "namespaces":
            try:
                return _Bubblewrap(self.packages, self.limits)
            except SandboxRefusedError as error:
                refused.append(f"bubblewrap: {error}")
        raise SandboxRefusedError(
            f"Python from a model is not run here, since the kernel refuses a sandbox ({'; '.join(refused)}). Allow "
            "unprivileged user namespaces, install bubblewrap, or leave the tool out"
        )


class _Run:
    """The client's side of one run: the pipe that it prints to and the socket of its report, which is its lifeline."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.output, write = os.pipe()
        mine, theirs = socket.socketpair()
        self.report = mine.detach()
        self.ends = (write, theirs.detach())
        self._given_up = time.monotonic() + limits.wall_seconds + _GRACE_SECONDS
        self._printed = self._told = b""
        self._open = {self.output, self.report}
        self._is_flood = False

    @property
    def is_over(self) -> bool:
        """Whether all descriptors are closed."""
        return not self._open

    @property
    def descriptors(self) -> set[int]:
        """The descriptors that are still open."""
        return set(self._open)

    def read(self, descriptor: int) -> None:
        """Read what is there."""
        try:
            chunk = os.read(descriptor, 1 << 16)
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            self._open.discard(descriptor)
            os.close(descriptor)
        elif descriptor == self.report:
            self._told += chunk
        else:
            self._printed += chunk
            if len(self._printed) > self._limits.output_bytes:
                self._is_flood = True
                self.release()

    def check_time(self) -> None:
        """Raise SandboxDiedError where the supervisor should have ended the run long ago."""
        if self._open and time.monotonic() > self._given_up:
            raise SandboxDiedError("the sandbox's server does not answer")

    def close_ends(self) -> None:
        """Close the ends that the server has now."""
        for descriptor in self.ends:
            os.close(descriptor)

    def release(self) -> None:
        """Close everything; the supervisor sees it and ends the run."""
        for descriptor in self._open:
            os.close(descriptor)
        self._open = set()

    def outcome(self) -> Ran:
        """Join the report and the output. Raise SandboxDiedError where there is no report."""
        output = self._printed[: self._limits.output_bytes].decode("utf-8", "replace")
        if self._is_flood:
            return Ran(output, None, "output")
        try:
            report = json.loads(self._told)
            results = tuple(json.loads(line) for line in report["result"].splitlines())
        except (ValueError, RecursionError):
            report, results = None, ()
        if not isinstance(report, dict):
            raise SandboxDiedError("a run ended without a report")
        status, reason = report["status"], report["reason"]
        by_limit = status == -signal.SIGKILL and report["cpu_seconds"] >= self._limits.cpu_seconds
        if status == -signal.SIGXCPU or by_limit:
            status, reason = None, "CPU time"
        return Ran(output, status, reason, results, report["cpu_seconds"], report["wall_seconds"])


def _read_ready(runs: Collection[_Run]) -> None:
    """Wait until some run has output, and read it."""
    poll = select.poll()
    owners = {descriptor: run for run in runs for descriptor in run.descriptors}
    for descriptor in owners:
        poll.register(descriptor, select.POLLIN)
    for descriptor, _ in poll.poll(1000):
        if descriptor in owners[descriptor].descriptors:
            owners[descriptor].read(descriptor)
    for run in runs:
        run.check_time()


def _python(code: str) -> list[str]:
    """Return the command that runs this library's server code alone: no environment, no site, no other package."""
    before = f"import sys; sys.path.append({str(_ROOT)!r}); from rollout.tools.sandbox import namespaces, run, server; "
    return [sys.executable, "-I", "-S", "-c", before + code]


class _Namespaces:
    """The server in namespaces of its own, at the other end of a socket."""

    def __init__(self, packages: Sequence[str]) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = mine
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the server is
        code = f"server.main({theirs.fileno()}, {list(packages)!r})"
        try:
            self._process = subprocess.Popen(
                _python(code),
                pass_fds=[theirs.fileno()],
                env={},
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=self._words,
                cwd="/",
                start_new_session=True,
            )
        finally:
            theirs.close()
        mine.settimeout(_START_SECONDS)
        try:
            said = json.loads(mine.recv(1 << 16) or b'{"refused": "the server ended"}')
        except TimeoutError:
            said = {"refused": f"the server did not start within {_START_SECONDS:g} s"}
        if "refused" in said:
            raise SandboxRefusedError(f"{said['refused']} {self.close()}".strip())
        mine.settimeout(None)

    def start(self, request: int, output: int, report: int) -> None:
        """Send a run to the server."""
        try:
            socket.send_fds(self._channel, [b"run"], [request, output, report])
        except OSError as error:
            raise SandboxDiedError(f"the sandbox's server is gone: {error}") from error

    def close(self) -> str:
        """End the server, and return what it printed on standard error."""
        self._channel.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        with self._words:
            self._words.seek(0)
            return self._words.read(2000).decode("utf-8", "replace").strip()


class _Bubblewrap:
    """bubblewrap, one process for each run."""

    def __init__(self, packages: Sequence[str], limits: Limits) -> None:
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxRefusedError("bwrap is not installed")
        self._program, self._limits = program, limits
        self._processes: list[subprocess.Popen[bytes]] = []
        code = f"import json; run.preload_modules(); print(json.dumps(namespaces.visible_paths({list(packages)!r})))"
        done = subprocess.run(_python(code), env={}, capture_output=True, check=False)
        if done.returncode:
            raise SandboxRefusedError(done.stderr.decode("utf-8", "replace")[-500:])
        self._paths: list[str] = json.loads(done.stdout)
        for self._capabilities in (BOUNDING, ()):
            tried = subprocess.run(self._command(()), env={}, capture_output=True, check=False)
            if not tried.returncode:
                return
        raise SandboxRefusedError(tried.stderr.decode("utf-8", "replace").strip()[-500:])

    def _command(self, arguments: Sequence[str]) -> list[str]:
        size = self._limits.file_bytes
        return bubblewrap_command(self._program, _ROOT, self._paths, size, self._capabilities, arguments)

    def start(self, request: int, output: int, report: int) -> None:
        """Start bubblewrap with a run."""
        self._processes = [p for p in self._processes if p.poll() is None]
        command = self._command([str(request), str(output), str(report)])
        ends = [request, output, report]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, pass_fds=ends, env={}, stdin=quiet, stdout=quiet, stderr=quiet, cwd="/")
        self._processes.append(process)

    def close(self) -> str:
        """End all runs."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes = []
        return ""
