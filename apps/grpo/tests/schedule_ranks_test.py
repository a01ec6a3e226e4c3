"""Fully asynchronous over two ranks: what they train on, that both have the same weights, and that nothing is lost."""

import os
import signal
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import apps.grpo.step as step
from apps.common.testing.process_kills import kill_at_call
from apps.grpo.testing.ranks import go_on_ranks, on_ranks, sound, trained_by
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from apps.grpo.testing.schedules import nothing, proofs, rows
from engines.launch import RankError
from rollout import RolloutLedger
from rollout.workers.process import WorkerProcess
from schedules.config import ScheduleConfig
from schedules.fully_async import follower as schedule_async_ranks
from schedules.fully_async.follower import Leader, StepDone, Wait


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("ranks") / "run"
    go_on_ranks(run_dir)
    return run_dir


def test_two_ranks_train_every_task_once_and_have_the_same_weights(whole: Path) -> None:
    sound(whole, on_ranks(whole))
    logged = rows(whole)
    assert logged[0]["run/world_size"] == 2
    assert [row["weights/version"] for row in logged[1:]] == [1, 2, 3, 4]
    assert all(0 < distance < 1e-5 for distance in proofs(logged[1:]))
    assert logged[1]["log_prob_difference"] < 1e-3
    assert {"eval/score"} <= set(logged[0]) & set(logged[2]) & set(logged[4])


def test_no_token_is_older_than_the_bound(whole: Path) -> None:
    """One transfer of weights, by what each rank trained; the run does use it."""
    ages = [step - 1 - line["oldest"] for step, line in trained_by(whole, 1).items()]
    assert len(ages) == 4
    assert max(ages) == 1
    assert all(row["schedule/staleness"] <= 1 for row in rows(whole)[1:])


def test_ranks_that_share_the_weights_train_on_nothing_old_where_nothing_may_be(tmp_path: Path) -> None:
    """Shards of FSDP2, and no slack: each step is sampled by the weights that it trains."""
    changes: dict[str, Any] = {
        "schedule": ScheduleConfig("fully_async", 0.0, partial_rollout=False),
        "engine": RECIPE.config.engine,
    }
    go_on_ranks(tmp_path / "run", **changes)
    sound(tmp_path / "run", on_ranks(tmp_path / "run", **changes))
    assert [line["oldest"] for line in trained_by(tmp_path / "run", 0).values()] == [0, 1, 2, 3]
    assert all(row["schedule/token_staleness"] == 0 for row in rows(tmp_path / "run")[1:])


def kill_before_a_group_is_recorded() -> None:
    kill_at_call(RolloutLedger, "finished", 7, "before")


def kill_before_a_step() -> None:
    kill_at_call(step, "train_on", 3, "before")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_run_and_loses_nothing(tmp_path: Path, rank: int) -> None:
    """The first one with a group that is not in the ledger; the other one amid a step that the first one trains."""
    kills = (kill_before_a_group_is_recorded,) if rank == 0 else (nothing, kill_before_a_step)
    with pytest.raises(RankError, match=f"rank {rank} died with exit code -9"):
        go_on_ranks(tmp_path / "run", *kills)
    go_on_ranks(tmp_path / "run")
    sound(tmp_path / "run", on_ranks(tmp_path / "run"))


def kill_the_sampler() -> None:
    """By SIGKILL, when it is asked for its tenth group."""
    real, calls = WorkerProcess.call, 0

    def call(self: WorkerProcess, name: str, **arguments: Any) -> Any:
        nonlocal calls
        calls += name == "play"
        found = real(self, name, **arguments)
        if name == "play" and calls == 10:
            assert self.process.pid is not None
            os.kill(self.process.pid, signal.SIGKILL)
        return found

    WorkerProcess.call = call  # type: ignore[method-assign]


def test_a_sampling_process_that_dies_is_replaced_with_the_weights_of_both(tmp_path: Path) -> None:
    """An export of weights that no step asked for: the other rank takes part in it."""
    go_on_ranks(tmp_path / "run", kill_the_sampler)
    sound(tmp_path / "run", on_ranks(tmp_path / "run"))


def break_the_second_step() -> None:
    real, calls = step.train_on, 0

    def train_on(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError("the second step broke")
        return real(*arguments)

    step.train_on = train_on  # type: ignore[assignment]


def tell_the_sampler() -> None:
    """The sampling process's number, in the file that a variable names."""
    real = WorkerProcess.__init__

    def init(self: WorkerProcess, *args: Any, **options: Any) -> None:
        real(self, *args, **options)
        Path(os.environ["SAMPLER_TOLD"]).write_text(str(self.process.pid))

    WorkerProcess.__init__ = init  # type: ignore[method-assign]


def test_an_error_of_a_rank_ends_all_and_their_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMPLER_TOLD", str(tmp_path / "sampler"))
    with pytest.raises(RankError, match=r"(?s)rank 1 failed.*the second step broke"):
        go_on_ranks(tmp_path / "run", tell_the_sampler, break_the_second_step)
    sampler, deadline = Path("/proc") / (tmp_path / "sampler").read_text(), time.monotonic() + 30
    while sampler.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not sampler.exists()


def test_who_waits_for_orders_hears_that_answers_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(schedule_async_ranks, "broadcast", lambda order, kinds: told.append(order))
    monkeypatch.setattr(schedule_async_ranks, "EVERY", 0.01)
    lead = Leader()
    answer: Future[None] = Future()
    lead.waits()
    assert told == []  # they heard something a moment ago
    monkeypatch.setattr(schedule_async_ranks, "QUIET_SECONDS", 0.0)

    def send(order: Any, kinds: Any) -> None:
        assert type(order) in kinds
        told.append(order)
        if len(told) == 3:
            answer.set_result(None)

    monkeypatch.setattr(schedule_async_ranks, "broadcast", send)
    lead.wait_for([answer])
    assert told == [Wait()] * 3
    lead.order(StepDone())
    assert told[3] == StepDone()
