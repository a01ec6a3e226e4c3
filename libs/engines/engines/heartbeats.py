"""Signs of life of ranks that an outer launcher started (torchrun, Slurm's srun, actors of Ray), in its store.

1. Each rank counts up in the store every second, from a thread: compiling, saving and waiting for others go on beating.
2. Each reads the count of the next rank that has not ended. One that stands still for `stall_seconds` (a stopped
   process, or code that holds the interpreter) is told by name; ranks of its machine kill it, so that connections to it
   close and the launcher names it; the others have some seconds to write what they have, and are ended then.
3. A rank whose interpreter is held writes the stacks of its threads itself, by a timer that needs no interpreter.
4. A rank whose collective waited too long asks the others where they are: each answers with its main thread's stack.

Time is counted by each rank for itself, and not while it is stopped: a whole run may be stopped and go on.
"""

import atexit
import faulthandler
import itertools
import json
import os
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

_BEAT_SECONDS = 1.0
_BEATS = 3
"""Beats of others that are awaited before they are told silent, or have no answer."""
_ENDED = 1 << 40
"""What a rank that has ended adds to its count."""
_GRACE_SECONDS = 15.0
_JOIN_SECONDS = 5.0
_STORE_SECONDS = 300.0
_FRAMES = 8
_LATE = re.compile("Timed out waiting|[Ss]ocket [Tt]imeout")
_numbers = itertools.count()
_heartbeat: "Heartbeat | None" = None


def begin_heartbeats(stall_seconds: float | None) -> bool:
    """Begin to beat, in a group of more than one rank that an outer launcher started; return whether this did. Every
    rank calls it. It lasts until `end_heartbeats`, at the latest until Python's end."""
    global _heartbeat
    if stall_seconds is None or _heartbeat is not None or dist.get_world_size() == 1:
        return False
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    attempt = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{next(_numbers)}"
    _heartbeat = Heartbeat(place, f"heartbeats.{attempt}", dist.get_rank(), dist.get_world_size(), stall_seconds)
    atexit.register(end_heartbeats)
    return True


def end_heartbeats() -> None:
    """Tell the other ranks that this one has ended."""
    global _heartbeat
    if _heartbeat is not None:
        _heartbeat.close()
        _heartbeat = None
        atexit.unregister(end_heartbeats)


def tell_late_ranks(error: BaseException) -> None:
    """Write where the ranks are, if this is the error of a collective that waited too long; do nothing else."""
    if _heartbeat is not None and isinstance(error, RuntimeError) and _LATE.search(str(error)):
        _heartbeat.tell_places()


class Clock:
    """Seconds in which this process ran: a pause, as of a stopped process, counts as two beats."""

    def __init__(self) -> None:
        self.now, self._before = 0.0, time.monotonic()

    def advance(self) -> float:
        """Return the seconds so far; to be called every beat."""
        self.now += min(time.monotonic() - self._before, 2 * _BEAT_SECONDS)
        self._before = time.monotonic()
        return self.now


class Heartbeat:
    """The beats of this rank, and its eyes on another one: two threads. To be closed.

    `place`: host and port of the store of the launcher, or of rank 0. `name`: of these heartbeats within it.
    """

    def __init__(self, place: tuple[str, int], name: str, rank: int, world: int, stall_seconds: float) -> None:
        self.rank, self.world, self.stall_seconds = rank, world, stall_seconds
        self._place = f"{place[0]}:{place[1]}"
        waits = timedelta(seconds=_STORE_SECONDS)
        self._store = dist.PrefixStore(
            name, dist.TCPStore(*place, is_master=False, wait_for_workers=False, timeout=waits)
        )
        self._store.set(f"process.{rank}", json.dumps([rank, *_process()]))
        self._target, self._count, self._since = (rank + 1) % world, 0, 0.0
        import engines.private_api  # noqa: F401  here: beside a loop of Python it takes longer than others wait

        self._closed, self._gone = threading.Event(), threading.Event()
        self._asked, self._told = threading.Event(), threading.Event()
        self._rounds, self._answered = 0, False
        self._end_at: float | None = None
        faulthandler.dump_traceback_later(stall_seconds, file=2)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._talk, self._watch)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End both threads, and tell the store."""
        self._closed.set()
        for thread in self._threads:
            thread.join(_JOIN_SECONDS)  # the store may be silent

    def tell_places(self) -> None:
        """Write where the ranks are that have not ended, once for all ranks that ask at a time."""
        self._asked.set()
        self._told.wait(5 * _BEATS * _BEAT_SECONDS)

    def _talk(self) -> None:
        """Exchange all that there is with the store: the only thread that does."""
        clock = Clock()
        try:
            while not self._closed.is_set() and self._end_at is None:
                self._store.add(f"{self.rank}", 1)
                self._look(clock.advance())
                self._answer()
                self._rounds += 1
                self._closed.wait(_BEAT_SECONDS)
            self._store.add(f"{self.rank}", _ENDED)
        except dist.DistNetworkError:
            pass  # the store's process has ended, and nobody is left to hear
        self._gone.set()

    def _watch(self) -> None:
        """Keep the timer from writing this rank's stacks, and end it where the store or another rank is silent."""
        clock, rounds, heard, ends = Clock(), -1, 0.0, float("inf")
        while not self._closed.wait(_BEAT_SECONDS):
            faulthandler.dump_traceback_later(self.stall_seconds, file=2)
            now = clock.advance()
            if self._end_at is None and (self._rounds != rounds or self._gone.is_set()):
                rounds, heard = self._rounds, now
            if self._end_at is None and now - heard > self.stall_seconds:
                _write(
                    f"rank {self.rank}: the ranks' store at {self._place}, of rank 0 or what started it, said nothing "
                    f"for {self.stall_seconds:g} s"
                )
                self._end_at = 0.0
            if self._end_at is not None:
                ends = min(ends, now + self._end_at)
            if now >= ends:
                os._exit(1)
        faulthandler.cancel_dump_traceback_later()

    def _look(self, now: float) -> None:
        """Look for a sign of life of the next rank, and for what others have found."""
        if self._store.check(["silent"]):
            self._end(json.loads(self._store.get("silent")))
            return
        count = self._store.add(f"{self._target}", 0)
        if count >= _ENDED:
            self._target = (self._target + 1) % self.world
        if count != self._count or count == 0 or count >= _ENDED:
            self._count, self._since = count, now
        elif now - self._since > self.stall_seconds and self._target in (silent := self._silent()):
            found = {"by": self.rank, "silent": [json.loads(self._store.get(f"process.{rank}")) for rank in silent]}
            self._end(json.loads(self._store.compare_set("silent", "", json.dumps(found))))

    def _beat(self, times: int, until: str = "") -> bool:
        """Count up some times, one a second; return whether that was cut short: the store has a key, or this closed."""
        for _ in range(times):
            self._store.add(f"{self.rank}", 1)
            self._rounds += 1
            if self._closed.wait(_BEAT_SECONDS) or (until and self._store.check([until])):
                return True
        return False

    def _silent(self) -> list[int]:
        """Return the ranks that do not beat; those that have not begun or have ended are none of them."""
        before = [self._store.add(f"{rank}", 0) for rank in range(self.world)]
        if self._beat(_BEATS):
            return []  # closed
        after = [self._store.add(f"{rank}", 0) for rank in range(self.world)]
        pairs = enumerate(zip(before, after, strict=True))
        return [rank for rank, (old, new) in pairs if 0 < old == new < _ENDED and rank != self.rank]

    def _end(self, found: Mapping[str, Any]) -> None:
        """Name the silent ranks, kill those of this machine, and let this rank end soon."""
        own = _process()
        if self.rank in (0, found["by"]):
            for rank, host, process, _ in found["silent"]:
                _write(
                    f"rank {rank} (process {process} on {host}) said nothing for {self.stall_seconds:g} s, as rank "
                    f"{found['by']} noticed: the run ends. The stacks of its threads are in its standard error, unless "
                    "it is stopped"
                )
        for rank, _, process, space in found["silent"]:
            if rank == self.rank:
                os._exit(1)  # it goes on, too late
            if space == own[2]:
                _kill(process)
        self._end_at = _GRACE_SECONDS

    def _answer(self) -> None:
        """Answer where this rank is if another one asks, and ask for this one."""
        if self._asked.is_set() and not self._told.is_set():
            self._ask()
            self._told.set()
        if not self._answered and self._store.check(["question"]):
            self._answered = True
            self._store.set(f"stack.{self.rank}", _main_stack())

    def _ask(self) -> None:
        """Ask the others, where none has yet, and write their answers; else wait until they are written."""
        first = self._store.compare_set("question", "", f"{self.rank}").decode() == f"{self.rank}"
        self._answered = True
        self._store.set(f"stack.{self.rank}", "")  # where it is says that it waits
        if not first:
            self._beat(4 * _BEATS, "answered")
            return
        for _ in range(3 * _BEATS):
            if self._beat(1) or not any(map(self._owes, range(self.world))):
                break
        places: dict[str, list[int]] = {}
        for rank in range(self.world):
            if self._store.check([f"stack.{rank}"]) and (stack := self._store.get(f"stack.{rank}").decode()):
                places.setdefault(stack, []).append(rank)
        _write(_places(self.rank, places))
        self._store.set("answered", "")

    def _owes(self, rank: int) -> bool:
        """Return whether a rank has begun, has not ended, and has not said where it is."""
        return 0 < self._store.add(f"{rank}", 0) < _ENDED and not self._store.check([f"stack.{rank}"])


def _places(asking: int, places: dict[str, list[int]]) -> str:
    """Return where ranks are, the fewest at one place first."""
    lines = [f"rank {asking} waited too long for others. These have not ended, and are, the innermost call last, at:"]
    for stack, ranks in sorted(places.items(), key=lambda place: len(place[1])):
        lines.append(f"rank{'s'[: len(ranks) > 1]} {', '.join(map(str, ranks))}:\n{stack.rstrip()}")
    return "\n".join(lines)


def _main_stack() -> str:
    from engines.private_api import current_frames  # loaded when the beats began

    frame = current_frames().get(threading.main_thread().ident or 0)
    return "".join(traceback.format_stack(frame)[-_FRAMES:])


def _process() -> tuple[str, int, str]:
    """Return this process's host, its number, and the space of such numbers: a boot of a kernel, and a namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname(), os.getpid(), f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"


def _kill(process: int) -> None:
    with suppress(ProcessLookupError):  # another rank of this machine has
        os.kill(process, signal.SIGKILL)


def _write(text: str) -> None:
    """Write lines to standard error, by no lock that a thread may hold for ever."""
    os.write(2, f"{text}\n".encode())
