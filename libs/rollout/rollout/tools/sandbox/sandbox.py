"""Runs of a model's Python code, in a sandbox made by the kernel: see `server` for its processes and `namespaces` for
what they can see.

`Sandbox` starts its server at the first run, and again where it has died; it refuses to start, with the reason, where
the kernel refuses (`SandboxRefusedError`): nothing is ever run with less confinement.
"""

import json
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from rollout.tools.sandbox.backends import Bubblewrap, Namespaces
from rollout.tools.sandbox.client_run import Limits as Limits
from rollout.tools.sandbox.client_run import Ran as Ran
from rollout.tools.sandbox.client_run import Run, read_ready
from rollout.tools.sandbox.errors import SandboxDiedError as SandboxDiedError
from rollout.tools.sandbox.errors import SandboxRefusedError as SandboxRefusedError


@dataclass(frozen=True)
class Program:
    """The code of a run, with its standard input; then the expressions whose values it returns.

    `errors` says whether standard error is a part of the output.
    """

    code: str
    stdin: str = ""
    expressions: tuple[str, ...] = ()
    errors: bool = True


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
        running: dict[int, Run] = {}
        ended: dict[int, Ran] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.max_runs:
                    index, program = waiting.popleft()
                    running[index] = self._begin(program)
                read_ready(running.values())
                for index in [i for i, r in running.items() if r.is_over]:
                    ended[index] = running.pop(index).outcome()
        except SandboxDiedError:
            self.close()
            raise
        finally:
            for run in running.values():
                run.release()
        return [ended[i] for i in range(len(programs))]

    def _begin(self, program: Program) -> "Run":
        request_fields = {**asdict(program), "limits": asdict(self.limits), "packages": list(self.packages)}
        run = Run(self.limits)
        request = written(request_fields)
        try:
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
                return Namespaces(self.packages)
            except SandboxRefusedError as error:
                refused.append(f"namespaces: {error}")
        if self.backend != "namespaces":
            try:
                return Bubblewrap(self.packages, self.limits)
            except SandboxRefusedError as error:
                refused.append(f"bubblewrap: {error}")
        raise SandboxRefusedError(
            f"Python from a model is not run here, since the kernel refuses a sandbox ({'; '.join(refused)}). Allow "
            "unprivileged user namespaces, install bubblewrap, or leave the tool out"
        )


def written(request: Mapping[str, Any]) -> int:
    """Return a descriptor from which a server reads the request."""
    descriptor = os.memfd_create("request")
    with open(os.dup(descriptor), "wb") as file:
        file.write(json.dumps(request).encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
