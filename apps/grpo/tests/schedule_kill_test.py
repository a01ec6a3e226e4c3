"""An asynchronous run that loses its disk, its driver, or its sampler amid a transfer: no task is lost. Kills at every
named point are `schedule_points_test`'s, at random moments `schedule_kills_test`'s, which is run by hand.
"""

import errno
import functools
import os
import signal
from pathlib import Path
from typing import Never

import pytest

import apps.grpo.step as step
from apps.common.run.checkpoints import last_checkpoint
from apps.common.testing.process_kills import (
    discard_output,
    hang_at_call,
    kill_at_call,
    run_in_child,
    start_child,
    wait_for_exit,
)
from apps.grpo.main import run
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from apps.grpo.testing.schedules import ASYNC, assert_nothing_lost, go, note, rows, small, watched
from engines.storage import checkpoint
from rollout import RolloutLedger
from rollout.sync.pieces import Bucket
from rollout.workers.process import WorkerProcess


def test_a_full_disk_stops_the_run_with_the_reason_and_it_goes_on_later(tmp_path: Path) -> None:
    """What the ledger holds by then is not sampled again."""
    run_dir = tmp_path / "run"
    child = start_child(full, run_dir)
    assert wait_for_exit(child) == 0
    assert "free some space and go on with --resume" in (tmp_path / "said").read_text()
    assert run_in_child(go, run_dir, ASYNC) == 0
    assert_nothing_lost(run_dir, small(run_dir, ASYNC))


def full(run_dir: Path) -> None:
    """The child: a disk that has no room for the ledger's third group; a limit of the kernel would stop the report."""
    discard_output(run_dir.parent / "err")
    real, calls = RolloutLedger.finished, 0

    def no_room(file: int, data: bytes, at: int) -> Never:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def finished(self: RolloutLedger, group: int, payload: bytes = b"") -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            os.pwrite = no_room  # type: ignore[assignment]
        real(self, group, payload)

    RolloutLedger.finished = finished  # type: ignore[method-assign]
    watched(run_dir)
    note(run_dir, {"from": 0})
    with pytest.raises(ValueError, match="No space left") as stopped:
        run(small(run_dir, ASYNC), RECIPE)
    (run_dir.parent / "said").write_text(str(stopped.value))


def break_sync() -> None:
    """The sampling process dies half-way through its second transfer of weights."""
    real, calls = WorkerProcess.receive, 0

    async def receive(self: WorkerProcess, bucket: Bucket) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGKILL)
        return await real(self, bucket)

    WorkerProcess.receive = receive  # type: ignore[method-assign]


def test_sync_failure_half_way(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run_in_child(go, run_dir, ASYNC, prepare=break_sync) == 0
    assert_nothing_lost(run_dir, small(run_dir, ASYNC))
    assert [row["weights/version"] for row in rows(run_dir)[1:]] == [1, 2, 3, 4]


def overtake() -> None:
    """The first checkpoint never gets its manifest; the driver is killed when the step after it is trained."""
    hang_at_call(checkpoint, "write_manifest")
    kill_at_call(step, "train_on", 2, "after")
    kill_at_call(RolloutLedger, "saved", 1, "before")  # it would come too soon


def test_a_checkpoint_that_was_being_written_at_the_kill_has_marked_nothing(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run_in_child(go, run_dir, ASYNC, prepare=overtake, save_every=1) == -signal.SIGKILL
    assert last_checkpoint(run_dir) is None
    ledger = RolloutLedger(run_dir / "ledger.bin", 0)
    assert (ledger.state.saved, sorted(ledger.state.batches)) == (0, [1, 2])
    ledger.close()
    assert run_in_child(go, run_dir, ASYNC, save_every=1) == 0
    assert_nothing_lost(run_dir, small(run_dir, ASYNC, save_every=1))


KILLS = (
    functools.partial(kill_at_call, RolloutLedger, "finished", 7, "before"),
    functools.partial(kill_at_call, step, "train_on", 2, "after"),
)


def test_a_driver_that_is_killed_twice_loses_nothing(tmp_path: Path) -> None:
    """Before a group is recorded; then, gone on with, after a step that is trained and not told."""
    run_dir = tmp_path / "run"
    for kill in KILLS:
        assert run_in_child(go, run_dir, ASYNC, prepare=kill) == -signal.SIGKILL
    assert run_in_child(go, run_dir, ASYNC) == 0
    assert_nothing_lost(run_dir, small(run_dir, ASYNC))
