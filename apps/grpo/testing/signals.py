"""What befalls a run at random moments: signals, a clock that jumps, a full disk, deleted files. Drawn by a seed."""

import contextlib
import json
import multiprocessing.process
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import psutil

from apps.common.testing.process_kills import start_child, wait_for_exit
from apps.grpo.testing.schedules import assert_nothing_lost, go, log_of, small
from schedules.config import ScheduleConfig

KINDS = ("stop", "term", "kill", "clock", "full", "deleted")
CODES = {"term": 128 + signal.SIGTERM, "kill": -signal.SIGKILL, "full": 1}
"""Exit status of a run by what ends it; the other kinds end none."""
FULL_DISK = re.compile("no space is left on the disk of|cannot grow")
"""What a run says of a disk that is full."""
STOPPED = 1.5
"""Seconds for which a process is stopped."""
DERIVED = ("report.html", "timeline.jsonl", "episodes.jsonl", "tensorboard", "certificates")
"""What a run writes for people, and nothing goes on from."""


def prepare() -> None:
    """Make SIGUSR2 move this process's clock by an hour, forward and back by turns, and SIGTERM the run's own.

    A run leaves SIGTERM to the process that started it, where there is one; here it is as if started by a shell.
    """
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    real, real_ns, jumps = time.time, time.time_ns, [0]

    def jump(*_: object) -> None:
        jumps[0] += 1

    time.time = lambda: real() + 3600 * (jumps[0] % 2)
    time.time_ns = lambda: real_ns() + 3600 * 10**9 * (jumps[0] % 2)
    signal.signal(signal.SIGUSR2, jump)


def play(run_dir: Path, schedule: ScheduleConfig, moments: int, seed: int) -> list[str]:
    """Run a schedule to its end through `moments` moments of each kind; return what befell it, in order.

    Asserts against the independent log that every task was trained once, that SIGTERM ends with a checkpoint and that
    a full disk is told. After each moment the run trains again before the next one.
    """
    draw = random.Random(seed)
    kinds = [kind for kind in KINDS for _ in range(moments)]
    draw.shuffle(kinds)
    steps = 12 * len(kinds)
    changes: dict[str, Any] = {"steps": steps, "save_every": 5, "eval_every": steps, "allow_idle_steps": None}

    def started() -> ForkProcess:
        return start_child(go, run_dir, schedule, prepare, **changes)

    child, befell = started(), list[str]()
    for kind in kinds:
        _await_step(run_dir, child)
        time.sleep(draw.uniform(0, 3) * _await_step(run_dir, child))
        assert child.is_alive(), f"the run was whole too soon, after {befell}"
        _ACTS[kind](child, run_dir, draw)
        befell.append(kind)
        if kind in CODES:
            code = wait_for_exit(child)
            said = _errors(run_dir).read_text()
            assert code == CODES[kind], f"{kind} ended the run with {code}, after {befell}: {said[-2000:]}"
            assert kind != "full" or FULL_DISK.search(said), said[-2000:]
            child = started()
    assert wait_for_exit(child, 1500) == 0, _errors(run_dir).read_text()[-2000:]
    assert_nothing_lost(run_dir, small(run_dir, schedule, **changes))
    return befell


def _await_step(run_dir: Path, child: ForkProcess, seconds: float = 300) -> float:
    """Wait until the run has trained a step since its last start, and one more than now; return how long that took."""
    before, began = _steps(run_dir), time.monotonic()
    while _steps(run_dir) <= max(before, 0) and time.monotonic() < began + seconds:
        assert child.is_alive(), f"the run ended with {child.exitcode}"
        time.sleep(0.01)
    assert _steps(run_dir) > 0
    return time.monotonic() - began


def _steps(run_dir: Path) -> int:
    """Return how many steps the run has told, -1 where it has just started."""
    path = log_of(run_dir)
    lines = path.read_text().splitlines() if path.exists() else []
    with contextlib.suppress(ValueError):  # a line that is being written
        if not lines or "from" in json.loads(lines[-1]):
            return -1
    return len(lines)


def _errors(run_dir: Path) -> Path:
    """Return the path of what the run's processes write to standard error."""
    return run_dir.parent / f"{run_dir.name}.err"


def _stop(child: ForkProcess, run_dir: Path, draw: random.Random) -> None:
    """Stop the driver or a process of its, for a while."""
    del run_dir
    victim = draw.choice(_processes(child))
    with contextlib.suppress(psutil.NoSuchProcess):
        victim.suspend()
        time.sleep(STOPPED)
        victim.resume()


def _processes(child: ForkProcess) -> list[psutil.Process]:
    """Return the driver and all processes of its."""
    assert child.pid is not None
    return [psutil.Process(child.pid), *psutil.Process(child.pid).children(recursive=True)]


def _send(number: int) -> Callable[[ForkProcess, Path, random.Random], None]:
    def send(child: ForkProcess, run_dir: Path, draw: random.Random) -> None:
        del run_dir, draw
        assert child.pid is not None
        os.kill(child.pid, number)

    return send


def _fill(child: ForkProcess, run_dir: Path, draw: random.Random) -> None:
    """Let no file grow beyond a random size, as if its disk were full: all but the test's own log and the errors."""
    kept = max(path.stat().st_size for path in (log_of(run_dir), _errors(run_dir))) + (1 << 16)
    largest = max(path.stat().st_size for path in run_dir.rglob("*") if path.is_file())
    limit = draw.randrange(kept, max(kept + 1, largest))
    for process in _processes(child):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.rlimit(psutil.RLIMIT_FSIZE, (limit, process.rlimit(psutil.RLIMIT_FSIZE)[1]))


def _delete(child: ForkProcess, run_dir: Path, draw: random.Random) -> None:
    """Delete what the run has written for people, and the oldest of several checkpoints."""
    del child
    doomed = [run_dir / name for name in DERIVED if (run_dir / name).exists()]
    doomed = draw.sample(doomed, min(len(doomed), 3)) + sorted((run_dir / "checkpoints").glob("step-??????"))[:-2]
    for path in doomed:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


_ACTS: dict[str, Callable[[ForkProcess, Path, random.Random], None]] = {
    "stop": _stop,
    "term": _send(signal.SIGTERM),
    "kill": _send(signal.SIGKILL),
    "clock": _send(signal.SIGUSR2),
    "full": _fill,
    "deleted": _delete,
}
