"""What confines the runs of a client: a server in namespaces of its own or in a container, or a bubblewrap each."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from rollout.tools.sandbox.bubblewrap import BOUNDING, bubblewrap_command
from rollout.tools.sandbox.client_run import Limits
from rollout.tools.sandbox.errors import SandboxDiedError, SandboxRefusedError
from rollout.tools.sandbox.podman import container_limits, find_podman, podman_command, with_socket

_ROOT = Path(__file__).parents[3]  # the folder that holds `rollout`
_START_SECONDS = 30.0


def _python(code: str) -> list[str]:
    """Return the command that runs this library's server code alone: no environment, no site, no other package."""
    before = f"import sys; sys.path.append({str(_ROOT)!r}); from rollout.tools.sandbox import namespaces, run, server; "
    return [sys.executable, "-I", "-S", "-c", before + code]


class _Server:
    """A server at the other end of a socket; `command` gives its command line from the descriptor of its end."""

    def __init__(self, command: Callable[[int], Sequence[str]], env: Mapping[str, str]) -> None:
        mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel = mine
        self._words: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  open as long as the server is
        try:
            self._process = subprocess.Popen(
                command(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                env=env,
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
        self._send(b"run", [request, output, report])

    def open_session(self, request: int, control: int) -> None:
        """Send a session to the server: programs in one working folder, started over its own channel."""
        self._send(b"session", [request, control])

    def _send(self, kind: bytes, descriptors: list[int]) -> None:
        try:
            socket.send_fds(self._channel, [kind], descriptors)
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


class Namespaces(_Server):
    """The server in namespaces of its own."""

    def __init__(self, packages: Sequence[str], programs: bool = False) -> None:
        super().__init__(lambda end: _python(f"server.main({end}, {list(packages)!r}, {programs})"), {})


class Podman(_Server):
    """The server of sessions in a container: with the files of a local image, or with the host's programs."""

    def __init__(self, packages: Sequence[str], image: str | None = None) -> None:
        program = find_podman()
        code = f"import json; run.preload_modules(); print(json.dumps(namespaces.visible_paths({list(packages)!r}, 1)))"
        done = subprocess.run(_python(code), env={}, capture_output=True, check=False)
        if done.returncode:
            raise SandboxRefusedError(done.stderr.decode("utf-8", "replace")[-500:])
        self._files = tempfile.TemporaryDirectory(prefix="sandbox-")  # holds the places of mounts alone
        os.chmod(self._files.name, 0o755)  # programs run as nobody
        command = podman_command(
            program, _ROOT, packages, json.loads(done.stdout), self._files.name, image, container_limits()
        )
        super().__init__(lambda end: with_socket(command, end), dict(os.environ))

    def close(self) -> str:
        """End the server and its container, and return what they printed on standard error."""
        said = super().close()
        self._files.cleanup()
        return said


class Bubblewrap:
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
