"""Where a process of environments runs: on this machine, or by a server on another (`environments.processes.serve`)."""

import contextlib
import os
import signal
import subprocess
import sys
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client, Connection
from typing import Any, Protocol

from rollout.environments.processes.resident import resident_bytes
from rollout.errors import EpisodeFailed
from rollout.workers.heartbeat import ask_stack

KEY = "TESSERA_ENVIRONMENT_KEY"
"""The environment variable of the key that a run and its servers share: who has it runs any code there."""


class Transport(Protocol):
    """A process, and the connection to it."""

    connection: "Connection[Any, Any]"

    def kill(self) -> None:
        """End the process and all that it has started."""
        ...

    def why_ended(self, seconds: float = 0.0) -> str | None:
        """Return why the process has ended, waiting so long; None where it has not, or that can't be known."""
        ...

    def resident_bytes(self) -> int:
        """Return the memory it has taken; 0 where another machine looks after that."""
        ...

    def ask_stack(self, why: str) -> None:
        """Write why it is about to be killed, and where it is."""
        ...


def start_worker(descriptor: int) -> "subprocess.Popen[bytes]":
    """Start a worker of a connection's descriptor, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "rollout.environments.processes.worker", str(descriptor)],
        pass_fds=[descriptor],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def kill_worker(process: "subprocess.Popen[bytes]") -> None:
    """Kill a worker with its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class LocalProcess:
    """A worker on this machine."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self._process = start_worker(theirs.fileno())
        theirs.close()

    def kill(self) -> None:
        """See `Transport`."""
        kill_worker(self._process)

    def why_ended(self, seconds: float = 0.0) -> str | None:
        """See `Transport`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"an environment ended its process (exit code {self._process.wait(seconds)})"
        return None

    def resident_bytes(self) -> int:
        """See `Transport`."""
        return resident_bytes(self._process.pid)

    def ask_stack(self, why: str) -> None:
        """See `Transport`."""
        ask_stack(self._process.pid, why)


class RemoteProcess:
    """A worker of a server on another machine, which ends it when this connection closes.

    Raises EpisodeFailed (to be tried again) where there is no server, and ValueError without a key, or with another.
    """

    def __init__(self, address: tuple[str, int]) -> None:
        self._server = f"{address[0]}:{address[1]}"
        try:
            self.connection = Client(address, "AF_INET", authkey=shared_key())
        except (OSError, EOFError) as error:
            raise EpisodeFailed(f"the environment server {self._server}: {error}", retryable=True) from error
        except AuthenticationError as error:
            raise ValueError(f"the environment server {self._server} has another {KEY}") from error

    def kill(self) -> None:
        """See `Transport`."""
        with contextlib.suppress(OSError):
            self.connection.close()

    def why_ended(self, seconds: float = 0.0) -> str | None:
        """See `Transport`."""
        return f"an environment ended its process on {self._server}, whose log says why" if seconds else None

    def resident_bytes(self) -> int:
        """See `Transport`."""
        return 0

    def ask_stack(self, why: str) -> None:
        """See `Transport`."""
        sys.stderr.write(f"{why}; it runs on {self._server}\n")


def shared_key() -> bytes:
    """Return the key. Raise ValueError where there is none, or one that is soon guessed."""
    key = os.environ.get(KEY, "")
    if len(key) < 16:
        raise ValueError(f"environment servers need a secret of 16 characters or more in {KEY}, here and on each")
    return key.encode()


def read_address(text: str) -> tuple[str, int]:
    """Return HOST:PORT in two parts. Raise ValueError for another text."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not int(port) < 1 << 16:
        raise ValueError(f"an environment server is HOST:PORT, got {text!r}")
    return host, int(port)
