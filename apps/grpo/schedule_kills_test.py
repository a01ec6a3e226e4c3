"""An asynchronous run that is killed at each named point and at twenty random moments: no task is lost.

By hand, as it takes minutes: `bazel test //apps/grpo:schedule_kills_test`.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from apps.common.kills import end_of, in_child, kill_at_call, start_child
from apps.grpo import schedule_async
from apps.grpo.schedule_testing import ASYNC, assert_nothing_lost, go, small
from rollout.workers.process import WorkerProcess

KILLS = {
    "a step before it is trained": lambda: kill_at_call(schedule_async, "train_on", 3, "before"),
    "a step after it is trained": lambda: kill_at_call(schedule_async, "train_on", 3, "after"),
    "a group before it is recorded": lambda: kill_at_call(schedule_async.RolloutLedger, "finished", 7, "before"),
    "a group after it is recorded": lambda: kill_at_call(schedule_async.RolloutLedger, "finished", 10, "after"),
    "a checkpoint before it is recorded": lambda: kill_at_call(schedule_async.RolloutLedger, "saved", 1, "before"),
    "amid a transfer of weights": lambda: kill_at_call(WorkerProcess, "receive", 2, "before"),
}


@pytest.mark.parametrize("point", KILLS)
def test_a_kill_of_the_driver_loses_nothing(tmp_path, point):
    """The driver trains too; its sampling process ends with it."""
    run_dir = tmp_path / "run"
    assert in_child(go, run_dir, ASYNC, prepare=KILLS[point]) == -signal.SIGKILL
    assert in_child(go, run_dir, ASYNC) == 0
    assert_nothing_lost(run_dir, small(run_dir, ASYNC))


def test_kills_at_twenty_random_moments(tmp_path):
    """Of the driver or of its sampling process, by a seed; the run is gone on with until it is whole."""
    draw = random.Random(11)
    run_dir = tmp_path / "run"
    kills = 0
    changes = {"steps": 12, "save_every": 3, "eval_every": 12}
    for _ in range(20):
        child = start_child(go, run_dir, ASYNC, **changes)
        time.sleep(draw.uniform(4, 25))
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
        end_of(child)
        if (run_dir / "export").is_dir():
            break
    assert in_child(go, run_dir, ASYNC, **changes) == 0
    assert kills > 3
    assert_nothing_lost(run_dir, small(run_dir, ASYNC, **changes))


def _worker_of(driver):
    """The driver's sampling process, or the driver while it has none."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        fields = path.read_text().rpartition(")")[2].split()
        if int(fields[1]) == driver and b"multiprocessing.spawn" in (path.parent / "cmdline").read_bytes():
            return int(path.parent.name)
    return driver
