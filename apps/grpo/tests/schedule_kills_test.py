"""An asynchronous run, on a rank or two, that is killed at twenty random moments: no task is lost.

By hand, as it takes minutes: `bazel test //apps/grpo:tests/schedule_kills_test`. See `schedule_points_test` too.
"""

import contextlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from apps.common.testing.process_kills import discard_output, start_child, wait_for_exit
from apps.grpo.testing.ranks import go_on_ranks, on_ranks
from apps.grpo.testing.schedules import ASYNC, assert_nothing_lost, go, small

WHOLE = 1500
"""Seconds that the rest of a run may take on a busy machine."""


def test_kills_at_twenty_random_moments(tmp_path: Path) -> None:
    """Of the driver or of its sampling process, by a seed; the run is gone on with until it is whole."""
    draw = random.Random(11)
    run_dir = tmp_path / "run"
    kills = 0
    changes = {"steps": 800, "save_every": 10, "eval_every": 800}
    for _ in range(20):
        child = start_child(go, run_dir, ASYNC, **changes)
        assert child.pid is not None
        time.sleep(draw.uniform(4, 15))
        if child.is_alive():
            victim = child.pid if draw.random() < 0.7 else _worker_of(child.pid)
            assert victim is not None
            os.kill(victim, signal.SIGKILL)
            kills += 1
            if victim != child.pid:
                time.sleep(draw.uniform(0, 5))
                if child.is_alive():
                    assert child.pid is not None
                    os.kill(child.pid, signal.SIGKILL)
        wait_for_exit(child)
    assert kills == 20, "the run was whole too soon"
    assert wait_for_exit(start_child(go, run_dir, ASYNC, **changes), WHOLE) == 0
    assert_nothing_lost(run_dir, small(run_dir, ASYNC, **changes))


def go_on_two_ranks(run_dir: Path, **changes: Any) -> None:
    """The child: two ranks, from the start or from where the folder stands."""
    os.setpgid(0, 0)
    discard_output(run_dir.parent / f"{run_dir.name}.err")
    go_on_ranks(run_dir, **changes)


def test_two_ranks_killed_at_twenty_random_moments(tmp_path: Path) -> None:
    """Of whoever started the ranks, of either rank, or of the process that samples, by a seed; the rest end by
    themselves, and the run is gone on with until it is whole."""
    draw = random.Random(13)
    run_dir = tmp_path / "run"
    victims = []
    changes = {"steps": 800, "save_every": 10, "eval_every": 800}
    for _ in range(20):
        child = start_child(go_on_two_ranks, run_dir, **changes)
        assert child.pid is not None
        time.sleep(draw.uniform(5, 15))
        below = _spawned(child.pid)
        if child.is_alive():
            number = draw.randrange(1 + len(below))
            victims.append(number)
            if number:
                below[number - 1].kill()
            if number == 3:  # it is replaced: time to see that begin
                time.sleep(draw.uniform(0, 10))
            if number in (0, 3):
                child.kill()
        wait_for_exit(child)
        assert not psutil.wait_procs(below, timeout=120)[1], "a process outlived its run"
    assert len(victims) == 20, "the run was whole too soon"
    assert wait_for_exit(start_child(go_on_two_ranks, run_dir, **changes), WHOLE) == 0
    assert len(set(victims)) > 2
    assert_nothing_lost(run_dir, on_ranks(run_dir, **changes))


def _spawned(pid: int) -> list[psutil.Process]:
    """The processes that a run started, by age: its two ranks, then the one that samples."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "spawn_main" in " ".join(process.cmdline()):
                found.append((process.create_time(), process.pid, process))
    return [process for *_, process in sorted(found)]


def _worker_of(driver: int) -> int:
    """The driver's sampling process, or the driver while it has none."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = path.read_text().rpartition(")")[2].split()
        if int(fields[1]) == driver and b"multiprocessing.spawn" in (path.parent / "cmdline").read_bytes():
            return int(path.parent.name)
    return driver
