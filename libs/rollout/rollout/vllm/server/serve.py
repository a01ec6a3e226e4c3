"""Serve one engine over one socket, until its other end is gone.

The main thread alone touches vLLM: it obeys the messages, makes a step, sends the tokens, and so on. A second thread
reads the socket; when that closes, it ends the process at once, whatever the main thread does.

| from the engine | |
| --- | --- |
| `start` | settings, once; answered by `ready` or `refused` |
| `ask` | requests: [number, ids, sampling] each, and of images: where `images` has them, places, positions' digest |
| `images` | beside `ask`: [name, grid, numbers of a patch] each, and the patches in the bytes behind the message |
| `end` | numbers of requests to end; each is answered with what it has |
| `load` | read weights from a file of them, once awake where it says `wake`; answered by `loaded` |
| `sleep` | free the device's memory; answered by `loaded` too |
| `go` | make steps again, after a `load` that said `wait` |
| `turn` | in each message to copies that share experts: its number, the same for all; alone where another has one |

| from the server | |
| --- | --- |
| `step` | [number, ids, log-probs, why it ended, experts] of each request that got on, and the weights' `version` |
| `not_asked` | a request's number, and why vLLM does not take it, or can't go on with it |
| `loaded` | the number of the call; `seconds`, or the `error` after which the old weights are in use |

A failure of vLLM ends the process, by which the engine learns of it.
"""

import multiprocessing.connection
import os
import queue
import shutil
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NoReturn

from rollout.vllm.client.wire import TAIL, TURN, Wire

if TYPE_CHECKING:
    from rollout.vllm.server.cpu_replicas import LockstepTurns  # torch
    from rollout.vllm.server.generator import Generator  # vLLM
    from rollout.vllm.server.node_workers import NodeWorkers  # vLLM


SOCKET_NAME = 107
"""Bytes of the longest name of a Unix socket."""


def serve(descriptor: int) -> None:
    """Serve until the other end of the socket `descriptor` is gone."""
    wire = Wire(socket.socket(fileno=descriptor))
    scratch = scratch_folder()
    os.environ["TMPDIR"] = tempfile.tempdir = scratch  # vLLM leaves files in it
    inbox: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read, args=(wire, inbox, scratch), daemon=True).start()
    try:
        _Server(wire, inbox).run()
    finally:  # it returns only after a refusal
        if sys.exc_info()[0] is not None:
            traceback.print_exc()  # the engine reads the last output
        _leave(scratch)


def scratch_folder() -> str:
    """Make the folder of vLLM's files: below TMPDIR, or in /tmp where the names of its sockets would not fit there."""
    base, prefix = tempfile.gettempdir(), "tessera-vllm-"
    longest = len(os.fsencode(base)) + len(f"/{prefix}12345678/") + len(str(uuid.UUID(int=0)))
    return tempfile.mkdtemp(prefix=prefix, dir=base if longest <= SOCKET_NAME else "/tmp")


def _read(wire: Wire, inbox: "queue.Queue[dict[str, Any]]", scratch: str) -> None:
    while (message := wire.receive()) is not None:
        inbox.put(message)
    _leave(scratch)


def _leave(scratch: str) -> None:
    """End the process at once: vLLM's own shutdown takes seconds, and there is nothing to save."""
    shutil.rmtree(scratch, ignore_errors=True)
    os._exit(0)


def _watch(workers: Sequence[BaseProcess]) -> None:
    """End with the first worker that does; the kernel ends the others, which may wait for it for ever (`start`)."""
    gone = multiprocessing.connection.wait([worker.sentinel for worker in workers])
    for rank, worker in enumerate(workers):
        if worker.sentinel in gone:
            print(f"worker {rank} of {len(workers)} is gone", file=sys.stderr, flush=True)
    os._exit(1)


def _pictures(message: dict[str, Any]) -> list[Any]:
    """Return the images after a message; most have none."""
    if "images" not in message:
        return []
    from rollout.vllm.server.images import received_images  # vLLM, which the first message starts

    return list(received_images(message["images"], message[TAIL]))


class _Server:
    """The main thread's part."""

    def __init__(self, wire: Wire, inbox: "queue.Queue[dict[str, Any]]") -> None:
        self._wire = wire
        self._inbox = inbox
        self._version = 0
        self._waits = False
        """For the other copies of the model, which have not all got so far."""

    def run(self) -> None:
        """Start vLLM by the first message, then serve for ever."""
        from rollout.vllm.server.generator import Generator  # vLLM, seconds: the reader is at work by now

        start = self._inbox.get()["start"]
        try:
            if start["engine"].get("node_rank"):
                self._follow(start)
            self._generator = Generator(start)
        except ValueError as error:
            traceback.print_exc()
            self._wire.send({"refused": str(error)})
            return
        self._say_ready(self._generator)
        if self._generator.turns is not None:
            self._take_turns(self._generator.turns)
        while True:
            while self._waits or not self._generator.busy or not self._inbox.empty():
                self._obey(self._inbox.get())
            self._step()

    def _follow(self, start: dict[str, Any]) -> NoReturn:
        """Keep this machine's workers for ever: the first machine's process calls them."""
        from rollout.vllm.server.node_workers import NodeWorkers  # vLLM, as in `run`

        workers = NodeWorkers(start)
        self._say_ready(workers)
        while True:
            self._inbox.get()

    def _say_ready(self, made: "Generator | NodeWorkers") -> None:
        if made.workers:
            threading.Thread(target=_watch, args=(made.workers,), daemon=True).start()
        self._wire.send({"ready": made.model_info()})

    def _take_turns(self, turns: "LockstepTurns") -> NoReturn:
        """Serve for ever beside the other copies, which share the model's experts: all make each step at once, and obey
        messages in the same order, between the same two steps. Each message has a number (`turn`), and each number goes
        to all, so that a copy that waits for the next one knows that the others get it too."""
        heard: deque[dict[str, Any]] = deque()
        seen = agreed = 0
        still = True
        while True:
            while (still and seen == agreed) or not self._inbox.empty():
                heard.append(self._inbox.get())
                seen = heard[-1][TURN]
            before, turn = agreed, turns.meet(self._generator.busy, seen)
            agreed = turn.agreed
            while heard and heard[0][TURN] <= agreed:
                self._obey(heard.popleft())
            if turn.busy and not self._waits:
                self._step()
            still = self._waits or (not turn.busy and turn.latest == agreed == before)

    def _step(self) -> None:
        self._tell(self._generator.step())

    def _tell(self, updates: Sequence[Any]) -> None:
        if updates:
            self._wire.send({"step": updates, "version": self._version})
        failures, self._generator.failures = self._generator.failures, []
        for number, why in failures:
            self._wire.send({"not_asked": number, "error": why})

    def _obey(self, message: dict[str, Any]) -> None:
        if "ask" in message:
            pictures = _pictures(message)
            for number, ids, sampling, *seen in message["ask"]:
                try:
                    shown = [[pictures[place] for place in seen[0]], *seen[1:]] if seen else []
                    self._generator.add(number, ids, sampling, *shown)
                except ValueError as error:
                    self._wire.send({"not_asked": number, "error": str(error)})
        elif "end" in message:
            self._tell([update for number in message["end"] if (update := self._generator.end(number)) is not None])
        elif "sleep" in message:
            start = time.perf_counter()
            self._tell(self._generator.drain())
            self._generator.sleep()
            self._wire.send({"loaded": message["sleep"]["call"], "seconds": time.perf_counter() - start})
        elif "go" in message:
            self._waits = False
        elif "load" in message:
            self._load(message["load"])

    def _load(self, load: dict[str, Any]) -> None:
        """Read weights; where that fails, read the earlier ones again before any further step."""
        start = time.perf_counter()
        self._waits = False
        self._tell(self._generator.drain())  # of the weights until now
        if load.get("wake"):
            self._generator.wake()
        try:
            self._generator.load(load["path"], load["digests"], load["recompute"])
        except RuntimeError as error:
            traceback.print_exc()
            if load["before"] is not None:
                path, digests = load["before"]
                self._generator.load(path, digests, load["recompute"])
            self._waits = load["wait"] and self._generator.turns is not None  # as the copies that took them do
            self._wire.send({"loaded": load["call"], "error": str(error)})
            return
        self._version, self._waits = load["version"], load["wait"]
        self._wire.send({"loaded": load["call"], "seconds": time.perf_counter() - start})
