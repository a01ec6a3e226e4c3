"""The actor of a rank: it starts the rank's process on its machine, forwards what it writes, and sends it signals."""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
"""Variables in which Ray says which devices an actor has."""
_LINES = 10_000
"""Lines that wait for the driver, at most; then the rank waits."""
_SECONDS = 5.0
"""That a rank's children may go on writing after its end."""


@dataclass(frozen=True)
class Place:
    """Where an actor is."""

    host: str
    address: str
    devices: Mapping[str, str]
    """Of VISIBLE those that are set."""


@dataclass(frozen=True)
class Output:
    """What a rank wrote, each line with whether it went to standard error; and its exit status, once it has ended."""

    lines: Sequence[tuple[bool, str]]
    status: int | None = None
    """Negative where a signal ended it."""


class RankActor:
    """One rank of a run, in a process of its own with the variables that torchrun would give it."""

    def __init__(self, address: str) -> None:
        """`address`: of this machine, by which the others reach it."""
        self._address = address
        self._lines: queue.Queue[tuple[bool, str] | None] = queue.Queue(_LINES)
        self._process: subprocess.Popen[str] | None = None
        self._store: Any = None

    def place(self) -> Place:
        """Return where this is."""
        devices = {name: os.environ[name] for name in VISIBLE if os.environ.get(name)}
        return Place(socket.gethostname(), self._address, devices)

    def serve_store(self, seconds: float) -> int:
        """Start the store by which all ranks meet, as torchrun's agent does; return its port.

        It listens on the machine's address in the cluster alone. `seconds`: that its users wait for one another.
        """
        import torch.distributed as dist  # slow to load, and the first rank's actor needs it alone

        family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
        with socket.create_server((self._address, 0), family=family, backlog=1024) as server:
            port = int(server.getsockname()[1])
            self._store = dist.TCPStore(
                self._address,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=seconds),
                master_listen_fd=server.detach(),
            )
        return port

    def start(self, words: Sequence[str], variables: Mapping[str, str], folder: str) -> str | None:
        """Start the process: `words` are a module and its arguments. Return why it can't be, or None."""
        if not Path(folder).is_dir():
            return f"{socket.gethostname()} has no folder {folder}: start from one that all machines have"
        runner = f"{__name__.rpartition('.')[0]}.rank_process"
        self._process = subprocess.Popen(
            [sys.executable, "-m", runner, *words],
            cwd=folder,
            env={**os.environ, **variables, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.PIPE,  # nothing is written to it: it closes when this process ends
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        streams = ((False, self._process.stdout), (True, self._process.stderr))
        readers = [threading.Thread(target=self._forward, args=stream, daemon=True) for stream in streams]
        for reader in readers:
            reader.start()
        threading.Thread(target=self._await_end, args=(readers,), daemon=True).start()
        return None

    def read(self) -> Output:
        """Return what the rank wrote since the last call, once there is something."""
        lines = [self._lines.get()]
        while lines[-1] is not None and len(lines) < _LINES and not self._lines.empty():
            lines.append(self._lines.get())
        told = [line for line in lines if line is not None]
        assert self._process is not None
        return Output(told, None if lines[-1] is not None else self._process.wait())

    def send(self, number: int) -> None:
        """Send the rank a signal; SIGKILL reaches all that it has started."""
        if self._process is None or self._process.poll() is not None:
            return
        if number == signal.SIGKILL:
            os.killpg(self._process.pid, number)
        else:
            self._process.send_signal(number)

    def _forward(self, error: bool, stream: IO[str]) -> None:
        for line in stream:
            self._lines.put((error, line.rstrip("\n")))

    def _await_end(self, readers: Sequence[threading.Thread]) -> None:
        assert self._process is not None
        self._process.wait()
        for reader in readers:
            reader.join(_SECONDS)
        self._lines.put(None)
