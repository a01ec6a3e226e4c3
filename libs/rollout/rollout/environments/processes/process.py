"""A process that plays environments, as a run sees it: calls, requests, heartbeats, and its end."""

import contextlib
import itertools
import threading
import time
from collections import Counter
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import Any, Protocol

from rollout.environments.processes.transports import Transport
from rollout.errors import EpisodeFailed
from rollout.workers.channel import Channel

LOOK = 0.25  # seconds between two looks at a process's memory
START = 60.0  # seconds in which a process has to begin


class EpisodeHandler(Protocol):
    """The run's side of an episode that a process plays."""

    name: str

    def on_request(self, head: dict[str, Any]) -> None:
        """Play what the environment asks of a sub-agent."""
        ...


class EnvironmentProcess:
    """One process, and the threads that read from it and write to it: no call of a process blocks the caller."""

    def __init__(self, transport: Transport, stall_seconds: float, memory: int, alone: bool = False) -> None:
        self._transport = transport
        self.alone, self.retired, self.why = alone, alone, ""
        self.busy = 0.0
        self.episodes: dict[int, EpisodeHandler] = {}
        self._stall_seconds, self._memory = stall_seconds, memory
        self._connection, self._channel = transport.connection, Channel(transport.connection)
        self._calls: dict[int, Future[tuple[dict[str, Any], bytes]]] = {}
        self._numbers, self._lock = itertools.count(), threading.Lock()
        self._outbox: SimpleQueue[tuple[dict[str, Any], bytes] | None] = SimpleQueue()
        for target in (self._read, self._write):
            threading.Thread(target=target, name="environment-process", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether it can still be called."""
        return not self.why

    def call(self, head: dict[str, Any], payload: bytes = b"") -> tuple[int, "Future[tuple[dict[str, Any], bytes]]"]:
        """Send a call; return its number, and the future of its result."""
        future: Future[tuple[dict[str, Any], bytes]] = Future()
        with self._lock:
            number = next(self._numbers)
            if self.alive:
                self._calls[number] = future
        if not self.alive:
            self._fail(future)
        self.send({**head, "id": number}, payload)
        return number, future

    def send(self, head: dict[str, Any], payload: bytes = b"") -> None:
        """Send a message, some time."""
        self._outbox.put((head, payload))

    def kill(self, why: str) -> None:
        """Kill it and all that its environments have started, and fail its calls."""
        with self._lock:
            self.why = self.why or why
            calls, self._calls = self._calls, {}
        self._transport.kill()
        self._outbox.put(None)
        for future in calls.values():
            self._fail(future)

    def _fail(self, future: "Future[tuple[dict[str, Any], bytes]]") -> None:
        with contextlib.suppress(InvalidStateError):
            future.set_exception(EpisodeFailed(self.why, retryable=True))

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (message := self._outbox.get()) is not None:
                self._channel.send(*message)

    def _read(self) -> None:
        heard = looked = time.monotonic()
        cpu = when = 0.0
        try:
            while self.alive:
                there = self._connection.poll(LOOK)
                if time.monotonic() - looked > LOOK:
                    looked = time.monotonic()
                    if (taken := self._transport.resident_bytes()) > self._memory:
                        return self.kill(
                            f"an environment process took {taken / 2**30:.2f} GiB of memory, "
                            f"{self._memory / 2**30:.2f} are its limit (--environment-memory-gib)"
                        )
                if not there:
                    if (why := self._transport.why_ended()) is not None:
                        return self.kill(why)
                    if time.monotonic() - heard > (self._stall_seconds if when else max(START, self._stall_seconds)):
                        return self._stalled()
                    continue
                head, payload = self._channel.receive()
                heard = time.monotonic()
                if "beat" in head:
                    self.busy, cpu, when = (head["beat"] - cpu) / max(heard - when, 1e-9), head["beat"], heard
                elif "ask" in head:
                    if environment := self.episodes.get(head["episode"]):
                        environment.on_request(head)
                else:
                    with self._lock:
                        future = self._calls.pop(head["id"], None)
                    if future is not None:
                        with contextlib.suppress(InvalidStateError):
                            future.set_result((head, payload))
        except (EOFError, OSError):
            self.kill(self._transport.why_ended(1.0) or "an environment closed its process's connection")
        finally:
            self._connection.close()

    def _stalled(self) -> None:
        """Ask a silent process where it is, then kill it."""
        classes = Counter(environment.name for environment in list(self.episodes.values()))
        why = f"an environment process said nothing for {self._stall_seconds:g} s"
        self._transport.ask_stack(f"{why} and is killed; it plays {dict(classes)}")
        self.kill(why)
