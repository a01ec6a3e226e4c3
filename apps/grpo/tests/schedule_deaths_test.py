"""Runs that overlap sampling with training, each in a forked child, killed at this point or that: nothing is lost.

They have a file of their own: a build of torch for CUDA forks no process that has computed a gradient.
"""

import os
import shutil
import signal
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import apps.grpo.step as step
from apps.common.testing.process_kills import kill_at_call, run_in_child
from apps.grpo.main import run
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from apps.grpo.testing.schedules import (
    ASYNC,
    ONE,
    assert_nothing_lost,
    go,
    proofs,
    rows,
    same_weights,
    small,
)
from rollout import RolloutLedger
from rollout.workers.channel import Message
from rollout.workers.process import WorkerProcess
from runlog.timeline import read_timeline
from schedules.config import ScheduleConfig
from schedules.fully_async.fully_async import FullyAsyncSchedule


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("one") / "run"
    assert run_in_child(go, run_dir, ONE) == 0
    return run_dir


def test_one_step_off_resumed_ends_with_the_same_bits(one_step: Path, tmp_path: Path) -> None:
    """Also after a kill amid a step, with answers in the ledger that no checkpoint goes with."""
    child = run_in_child(go, tmp_path / "run", ONE, prepare=lambda: kill_at_call(step, "train_on", 4, "before"))
    assert child == -signal.SIGKILL
    assert run_in_child(go, tmp_path / "run", ONE) == 0
    assert same_weights(one_step, tmp_path / "run")
    assert [row["reward"] for row in rows(tmp_path / "run")[1:]] == [row["reward"] for row in rows(one_step)[1:]]


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("async") / "run"
    assert run_in_child(go, run_dir, ASYNC) == 0
    return run_dir


@pytest.mark.parametrize("schedule", [ScheduleConfig(), ONE], ids=lambda schedule: schedule.mode)
def test_no_other_schedule_takes_over_from_fully_async(
    schedule: ScheduleConfig, asynchronous: Path, tmp_path: Path
) -> None:
    """Its tasks were asked ahead: another schedule would skip those that wait in the ledger, without a word."""
    shutil.copytree(asynchronous, tmp_path / "run")
    with pytest.raises(ValueError, match=r"go on with --schedule.mode fully_async"):
        run(small(tmp_path / "run", schedule, resume=True, steps=6), RECIPE)


def test_fully_async_trains_every_task_once_within_the_bound(asynchronous: Path) -> None:
    config = small(asynchronous, ASYNC)
    assert_nothing_lost(asynchronous, config)
    logged = rows(asynchronous)
    assert all(row["schedule/staleness"] <= 1 for row in logged[1:])
    assert max(row["schedule/token_staleness"] for row in logged[1:]) > 0
    assert [row["weights/version"] for row in logged[1:]] == [1, 2, 3, 4]
    assert logged[1]["log_prob_difference"] < 1e-3
    assert {"eval/score"} <= set(logged[0]) & set(logged[2]) & set(logged[4])
    assert {span.lane for span in read_timeline(asynchronous)} == {"trainer", "sampler", "weights"}
    assert all(row["train/grad_norm"] > 1e-4 for row in logged[1:])
    assert all(0 < distance < 1e-5 for distance in proofs(logged[1:]))


def test_a_kill_of_the_driver_loses_nothing(tmp_path: Path) -> None:
    """Before a finished group is recorded; more moments are `schedule_points_test`'s. Its sampler ends with it."""
    run_dir = tmp_path / "run"
    kill = lambda: kill_at_call(RolloutLedger, "finished", 7, "before")  # noqa: E731
    assert run_in_child(go, run_dir, ASYNC, prepare=kill) == -signal.SIGKILL
    assert run_in_child(go, run_dir, ASYNC) == 0
    assert_nothing_lost(run_dir, small(run_dir, ASYNC))


def kill_worker(which: int) -> None:
    """The sampling process ends, by SIGKILL, when it is asked for its `which`-th group."""
    real, calls = WorkerProcess.call, 0

    def call(self: WorkerProcess, name: str, **arguments: Any) -> Any:
        nonlocal calls
        calls += name == "play"
        found = real(self, name, **arguments)
        if name == "play" and calls == which:
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGKILL)
        return found

    WorkerProcess.call = call  # type: ignore[method-assign]


def test_engine_death_in_mid_generation(tmp_path: Path) -> None:
    """Another process takes over; the groups that were lost begin again."""
    run_dir = tmp_path / "run"
    assert run_in_child(go, run_dir, ASYNC, prepare=lambda: kill_worker(10)) == 0
    assert_nothing_lost(run_dir, small(run_dir, ASYNC))


def answer_late() -> None:
    """The first sampling process dies with its eighth group, whose answer comes once that group counts as lost."""
    real, lost, held = WorkerProcess.call, FullyAsyncSchedule._lost, list[Future[Message]]()
    calls = 0

    def call(self: WorkerProcess, name: str, **arguments: Any) -> Any:
        nonlocal calls
        calls += name == "play"
        found = real(self, name, **arguments)
        if name != "play" or calls != 8:
            return found
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        held.append(Future())
        return held[0]

    def late(self: FullyAsyncSchedule) -> list[int]:
        groups = lost(self)
        assert 7 in groups
        held[0].set_result(({}, b"nobody's"))
        return groups

    WorkerProcess.call, FullyAsyncSchedule._lost = call, late  # type: ignore[method-assign]


def test_an_answer_of_a_dead_sampler_whose_groups_are_lost_is_nobodys(tmp_path: Path) -> None:
    """As of Ray's samplers, whose deaths and answers come by several threads."""
    run_dir = tmp_path / "run"
    assert run_in_child(go, run_dir, ASYNC, prepare=answer_late) == 0
    assert_nothing_lost(run_dir, small(run_dir, ASYNC))


def kill_when_handed(*which: int) -> None:
    """SIGKILL for the first sampling process at its 10th group, and for those numbered `which` at their hand-over."""
    real, workers = WorkerProcess.call, []
    kill_worker(10)
    counted = WorkerProcess.call

    def call(self: WorkerProcess, name: str, **arguments: Any) -> Any:
        if self not in workers:
            workers.append(self)
        if name != "prepare" or workers.index(self) not in which:
            return counted(self, name, **arguments)
        found = real(self, name, **arguments)
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        return found

    WorkerProcess.call = call  # type: ignore[method-assign]


def test_death_of_a_replacement_while_it_is_handed_the_weights(tmp_path: Path) -> None:
    """Two in a row: another one takes over, and the groups that the first one lost begin again."""
    run_dir = tmp_path / "run"
    assert run_in_child(go, run_dir, ASYNC, prepare=lambda: kill_when_handed(1, 2)) == 0
    assert_nothing_lost(run_dir, small(run_dir, ASYNC))


def test_a_sampler_that_dies_again_and_again_ends_the_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert run_in_child(go, run_dir, ASYNC, prepare=lambda: kill_when_handed(1, 2, 3, 4)) not in (0, -signal.SIGKILL)
    assert "the sampling process died 4 times in a row" in (tmp_path / "run.err").read_text()
