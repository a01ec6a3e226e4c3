"""Runs that refill groups without signal, killed and gone on with: each task with signal is trained once, in order."""

import functools
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

import apps.grpo.step as step
from apps.common.testing.process_kills import discard_output, kill_at_call, run_in_child
from apps.grpo.main import run
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from apps.grpo.testing.recipe import AsciiEnvironment, AsciiTasks
from apps.grpo.testing.schedules import ASYNC, ONE, SYNC, history, note_start, rows, same_weights, small, watched
from rollout import EnvironmentFactory, Reply, RolloutLedger, StepResult, TaskRow
from rollout.tools.workers import instant
from schedules.config import FilterGroups, ScheduleConfig
from schedules.sampling.refill import DROPPED


class SilentEnvironment(AsciiEnvironment):
    """An environment of one turn that tells replies apart, but those to multiples of 3."""

    async def step(self, reply: Reply) -> StepResult:
        """Score the reply."""
        self.reward = 0.0 if self.number % 3 == 0 else crc32(reply.text.encode()) / 2**32
        return StepResult()


@dataclass(frozen=True)
class SilentTasks(AsciiTasks):
    """Their tasks."""

    def environment(self, row: TaskRow) -> EnvironmentFactory:
        """Return the environment of the row's number."""
        return instant(functools.partial(SilentEnvironment, row.data["number"]))


def go(run_dir: Path, schedule: ScheduleConfig, prepare: Callable[[], object] = lambda: None) -> None:
    """Run in a child, from the start or resumed."""
    os.setpgid(0, 0)
    discard_output(run_dir.parent / f"{run_dir.name}.err")
    watched(run_dir)
    resume = note_start(run_dir)
    prepare()
    recipe = replace(RECIPE, make_tasks=lambda config, _: SilentTasks(config.data.eval_prompts))
    run(small(run_dir, schedule, resume=resume, filter_groups=FilterGroups(enable=True)), recipe)


Kills = dict[str, tuple[ScheduleConfig, tuple[Any, ...]]]
KILLS: Kills = {
    "sync, a step before it is saved": (SYNC, (step, "train_on", 3, "after")),
    "one step off, a round before it is recorded": (ONE, (RolloutLedger, "finished", 5, "before")),
    "fully async, a group without signal after it is recorded": (ASYNC, (RolloutLedger, "no_signal", 4, "after")),
}
LONG: Kills = {
    "one step off, a round after it is recorded": (ONE, (RolloutLedger, "finished", 8, "after")),
    "fully async, a group without signal before it is recorded": (ASYNC, (RolloutLedger, "no_signal", 3, "before")),
    "fully async, a step after it is trained": (ASYNC, (step, "train_on", 4, "after")),
}
"""Cases of refill_long_test."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that nobody killed, in the schedules whose runs end with the same bits."""
    found = {schedule.mode: tmp_path_factory.mktemp(schedule.mode) / "run" for schedule in (SYNC, ONE)}
    for mode, run_dir in found.items():
        assert run_in_child(go, run_dir, ScheduleConfig(mode)) == 0
    return found


def assert_trained_once(kill: str, whole: dict[str, Path], tmp_path: Path) -> None:
    """Kill a run and go on with it: each task with signal is trained once, to the bits of a run that nobody killed."""
    schedule, where = (KILLS | LONG)[kill]
    assert run_in_child(go, tmp_path / "run", schedule, functools.partial(kill_at_call, *where)) == -signal.SIGKILL
    assert run_in_child(go, tmp_path / "run", schedule) == 0
    trained = [task for tasks in history(tmp_path / "run").values() for task in tasks]
    with_signal = [f"number-{n}" for n in range(8, 40) if n % 3]
    assert sorted(trained) == sorted(with_signal[: 4 * 4])
    if schedule.mode in whole:
        assert sum(row[DROPPED] for row in rows(tmp_path / "run")[1:]) > 4
        assert same_weights(whole[schedule.mode], tmp_path / "run")


@pytest.mark.parametrize("kill", KILLS)
def test_a_killed_run_trains_each_task_with_signal_once(kill: str, whole: dict[str, Path], tmp_path: Path) -> None:
    assert_trained_once(kill, whole, tmp_path)
