"""The processes of a vLLM engine: one for each copy of the model, all with the same files of weights.

1. New weights go to all. A copy that has read them waits until all have, so that no token comes from weights that the
   engine may still drop; where one can't read them, all have the old ones again.
2. A copy that dies is left out from then on, with a message; without any copy the engine is dead.
3. Copies that share the model's experts make each step together, and obey in the same order between the same steps:
   each message to one has a number that all get. When one dies, all of them end.

vLLM's own data parallelism puts each copy's core into a further process behind a coordinator, which outlive a killed
parent, and has no step between which a copy takes weights. Of it only the exchanges of experts are used (3).
"""

import asyncio
import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.vllm.client.process import VllmProcess
from rollout.vllm.client.wire import TURN
from rollout.vllm.settings.config import VllmConfig

Message = dict[str, Any]
CALL = "call"
"""Key of the call's number in a message that copies answer."""
FIRST_SECONDS = 60.0
"""Most seconds until the first prompt is answered."""


@dataclass
class _Call:
    """A call of all living copies and those that have not answered; `seconds` is the slowest one's."""

    loop: asyncio.AbstractEventLoop
    answer: "asyncio.Future[float]"
    waited_for: set[int]
    seconds: float = 0.0
    errors: dict[int, str] = field(default_factory=dict)


class Replicas:
    """`config.data_parallel` processes, each with `config.tensor_parallel` devices of its own, or with a share of one.

    Raises:
        ValueError: there is no interpreter that has vLLM.
    """

    def __init__(self, config: VllmConfig, descriptors: Sequence[int]) -> None:
        self._seconds = config.start_seconds
        self._count, self._sharing = config.data_parallel, config.copies_per_device
        self._joined = config.experts_over_copies
        self._turn, self._order = 0, threading.Lock()
        self._processes: list[VllmProcess] = []
        self._start: Message = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._calls: dict[int, _Call] = {}
        self._dead: dict[int, str] = {}
        self._closed = False
        whole = False
        try:
            for copy in range(self._count):
                self._processes.append(VllmProcess(config, descriptors, copy))
            whole = True
        finally:
            if not whole:
                self.close()

    @property
    def pids(self) -> list[int]:
        """Numbers of the processes."""
        return [process.pid for process in self._processes]

    @property
    def alive(self) -> list[int]:
        """The copies that are alive."""
        return [copy for copy in range(self._count) if copy not in self._dead]

    @property
    def dead(self) -> Mapping[int, str]:
        """Last output of each dead copy."""
        return dict(self._dead)

    def together(self) -> dict[str, int] | None:
        """Return how copies that share experts meet, on this machine; None where each has all experts."""
        return {"size": self._count, "port": two_free_ports()} if self._joined else None

    def begin(self, start: Message) -> None:
        """Start all copies; of those that share a device the first one, the others as `wait_until_ready` says."""
        self._start = start
        self._begin(0)

    def _begin(self, turn: int) -> None:
        for place, process in enumerate(self._processes[turn :: self._sharing]):
            with contextlib.suppress(OSError):  # `_first` raises with its last output
                process.wire.send({"start": of_copy(self._start, turn + place * self._sharing)})

    def wait_until_ready(self) -> Message:
        """Wait for the copies, and return the first one's facts, with all copies' experts where shared.

        Copies that share a device start one after another, as each measures what memory it finds free.

        Raises:
            ValueError: vLLM can't do what is asked.
            RuntimeError: a process died before it was ready.
        """
        facts: Message = {}
        experts: list[Any] = []
        for turn in range(self._sharing):
            if turn:
                self._begin(turn)
            for process in self._processes[turn :: self._sharing]:
                answer = self._first(process)
                if "refused" in answer:
                    raise ValueError(answer["refused"])
                process.has_workers(answer["ready"]["workers"])
                facts = facts or answer["ready"]
                experts += answer["ready"].get("experts", ())
        return facts | {"experts": experts} if self._joined else facts

    def load_first(self, load: Message, model: Path) -> None:
        """Load the first weights in all copies. Raise ValueError where one refuses, RuntimeError where one died."""
        self._send_all({"load": load | {CALL: -1, "wait": False}})
        for process in self._processes:
            loaded = self._first(process)
            if "error" in loaded:
                raise ValueError(f"vLLM does not take the weights of {model}: {loaded['error']}")

    def ask_first(self, seconds: float = FIRST_SECONDS) -> None:
        """Sample a token with each copy: kernels that are missing or compiled for ever show at the first prompt.

        Raises:
            RuntimeError: one died, or none came in time.
        """
        self._send_all({"ask": [[-1, [0, 0], {"max_tokens": 1, "temperature": 0.0}]]})
        for process in self._processes:
            answer = process.wire.receive(seconds)
            if answer is None:
                raise RuntimeError(f"vLLM did not answer its first prompt in {seconds:g} s. {process.last_words()}")

    def listen(self, on_message: Callable[[Message], None], lost: Callable[[int, str], None]) -> None:
        """Start threads that pass on what copies say of requests, and the last output of a copy that ends."""
        for copy in range(self._count):
            threading.Thread(target=self._read, args=(copy, on_message, lost), name="rollout-vllm", daemon=True).start()

    def send(self, copy: int, message: Message, tail: Sequence[memoryview] = ()) -> None:
        """Send a message to one copy."""
        if self._joined:
            self._send_turn({copy: message}, tail)
        else:
            self._send(copy, message, tail)

    def _send(self, copy: int, message: Message, tail: Sequence[memoryview] = ()) -> None:
        with contextlib.suppress(OSError):  # its reader sees it too, and fails its requests
            self._processes[copy].wire.send(message, tail)

    def _send_turn(self, messages: Mapping[int, Message], tail: Sequence[memoryview] = ()) -> None:
        """Send the next number to all copies, with its message to those that have one."""
        with self._order:
            self._turn += 1
            for copy in self.alive:
                self._send(copy, messages.get(copy, {}) | {TURN: self._turn}, tail if copy in messages else ())

    async def call(self, kind: str, message: Message, in_step: bool = False) -> float:
        """Call all copies, wait until all are done, and return the seconds of the slowest.

        `in_step`: none makes a step before all are done; where this raises, not before it gets other weights.

        Raises:
            RuntimeError: one failed, or none is left.
        """
        loop = asyncio.get_running_loop()
        number, answer = next(self._numbers), loop.create_future()
        with self._lock:
            alive = self.alive
            if alive:
                self._calls[number] = _Call(loop, answer, set(alive))
        if not alive:
            raise RuntimeError("the engine was closed" if self._closed else next(iter(self._dead.values())))
        wait = in_step and self._count > 1
        try:
            self._send_to(alive, {kind: message | {CALL: number, "wait": wait}})
            seconds: float = await answer
        finally:
            with self._lock:
                del self._calls[number]
        if wait:
            self._send_all({"go": number})
        return seconds

    def tell(self, kind: str, message: Message) -> None:
        """Send a message to all copies without waiting."""
        self._send_all({kind: message | {CALL: -1, "wait": False}})

    def close(self) -> None:
        """End all copies."""
        self._closed = True
        for process in self._processes:
            process.wire.close()
        for process in self._processes:
            process.close()

    def _first(self, process: VllmProcess) -> Message:
        answer = process.wire.receive(self._seconds)
        if answer is None:
            raise RuntimeError(process.last_words())
        return answer

    def _send_all(self, message: Message) -> None:
        self._send_to(self.alive, message)

    def _send_to(self, copies: Sequence[int], message: Message) -> None:
        if self._joined:
            self._send_turn(dict.fromkeys(copies, message))
            return
        for copy in copies:
            self.send(copy, message)

    def _read(self, copy: int, on_message: Callable[[Message], None], lost: Callable[[int, str], None]) -> None:
        """Pass on the messages of a copy until it ends."""
        process = self._processes[copy]
        while (message := process.wire.receive()) is not None:
            if "loaded" in message:
                self._answered(copy, message["loaded"], message)
            else:
                on_message(message)
        words = "the engine was closed" if self._closed else process.last_words()
        with self._lock:
            if copy in self._dead:  # it ended with another copy, which was reported
                return
            ended = self.alive if self._joined else [copy]
            self._dead |= dict.fromkeys(ended, words)
            calls = list(self._calls)
            alone = len(self._dead) == self._count
        lost(copy, words)
        for number in calls:
            for one in ended:
                self._answered(one, number, {"error": words} if alone and one == copy else {})
        for one in ended:
            if one != copy:
                self._processes[one].wire.close()

    def _answered(self, copy: int, number: int, message: Message) -> None:
        """Record that a copy has answered a call, or never will; the last answer ends the call."""
        with self._lock:
            call = self._calls.get(number)
            if call is None or copy not in call.waited_for:
                return
            call.waited_for.remove(copy)
            if "error" in message:
                call.errors[copy] = message["error"]
            call.seconds = max(call.seconds, message.get("seconds", 0.0))
            if call.waited_for:
                return
        if not call.loop.is_closed():
            call.loop.call_soon_threadsafe(_settle, call, self._count)


def _settle(call: _Call, count: int) -> None:
    if call.answer.done():
        return
    if call.errors:
        named = [f"copy {copy} of {count}: {error}" if count > 1 else error for copy, error in call.errors.items()]
        call.answer.set_exception(RuntimeError("; ".join(named)))
    else:
        call.answer.set_result(call.seconds)


def of_copy(start: Message, copy: int) -> Message:
    """Return the start message of a copy, with a seed of its own: with equal seeds copies would repeat each other's
    completions of a group, which is spread over them."""
    engine, together = start["engine"], start.get("together")
    own = start | {"engine": engine | {"seed": engine["seed"] + copy}}
    return own if together is None else own | {"together": together | {"rank": copy}}


def two_free_ports() -> int:
    """Return the first of two adjacent ports of this machine that are free at this moment."""
    while True:
        with socket.socket() as one, socket.socket() as other:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            try:
                other.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):  # the port is taken, or does not exist
                continue
            return port
