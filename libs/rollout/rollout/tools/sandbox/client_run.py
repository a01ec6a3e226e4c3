"""A run from the client's side: its limits, its pipes, and how it ended."""

import json
import os
import select
import signal
import socket
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from rollout.tools.sandbox.errors import SandboxDiedError

GRACE_SECONDS = 10.0  # past the wall-clock limit, before the server itself counts as dead


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
    ended it ("wall time", "CPU time", "memory", "output" or "files"), if any. `output` is what it printed
    (standard error too, cut at the limit), `results` the values of the evaluated expressions (`run.encoded`).
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


class Run:
    """The client's side of one run: the pipe that it prints to and the socket of its report, which is its lifeline."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.output, write = os.pipe()
        mine, theirs = socket.socketpair()
        self.report = mine.detach()
        self.ends = (write, theirs.detach())
        self._given_up = time.monotonic() + limits.wall_seconds + GRACE_SECONDS
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


def read_ready(runs: Collection[Run]) -> None:
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
