"""Schedules that sample ahead: what they train on and show, what may go on from them; kills: schedule_deaths_test."""

import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import apps.grpo.step as step
from apps.common.cli import command_line as cli
from apps.common.cluster import Cluster
from apps.common.run.reporter import Reporter
from apps.common.testing.weight_delta import assert_trained
from apps.grpo.main import configure, run
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from apps.grpo.testing.recipe import HeldTasks, make_hang_tasks
from apps.grpo.testing.schedules import ASYNC, ONE, assert_timed, rows, small
from engines.launch import RankError
from rollout.control.staleness import Train
from rollout.episodes.summary import AnyEpisode
from rollout.sync.pieces import Bucket
from rollout.workers.process import WorkerProcess
from runlog.timeline import bubble_shares, read_timeline
from schedules.config import ScheduleConfig
from schedules.fully_async.fully_async import FullyAsyncSchedule
from schedules.reporting import live as looks
from schedules.reporting.timeline import SamplerLane
from schedules.schedule import TrainStepResult
from schedules.weights.weight_checks import WeightsNotTakenError


@pytest.fixture(scope="module")
def one_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("one") / "run"
    run(small(run_dir, ONE), RECIPE)
    assert_trained(run_dir)
    return run_dir


def test_one_step_off_trains_on_the_version_before(one_step: Path) -> None:
    logged = rows(one_step)
    assert [row["step"] for row in logged] == [0, 1, 2, 3, 4]
    assert [row["rollout/policy_version"] for row in logged[1:]] == [0, 0, 1, 2]
    assert [row["schedule/staleness"] for row in logged[1:]] == [0, 1, 1, 1]
    assert [row["weights/version"] for row in logged[1:]] == [1, 2, 3, 4]
    assert logged[1]["log_prob_difference"] < 1e-3 < logged[2]["log_prob_difference"]


def test_one_step_off_shows_when_who_was_busy(one_step: Path) -> None:
    spans = read_timeline(one_step)
    assert {(span.lane, span.kind) for span in spans} == {
        ("trainer", "train"),
        ("sampler", "sample"),
        ("weights", "sync"),
    }
    assert set(bubble_shares(spans)) == {"trainer", "sampler", "weights"}
    assert "Timeline" in (one_step / "report.html").read_text()


def test_each_hand_over_is_timed(one_step: Path) -> None:
    assert_timed(rows(one_step)[1:])


def test_one_step_off_on_two_ranks(one_step: Path, tmp_path: Path) -> None:
    run(small(tmp_path / "two", ONE, nproc_per_node=2), RECIPE)
    for left, right in zip(rows(one_step)[1:], rows(tmp_path / "two")[1:], strict=True):
        for name in ("reward", "rollout/tokens", "rollout/policy_version"):
            assert right[name] == pytest.approx(left[name], abs=1e-6)


@pytest.mark.parametrize("processes", [(2, 1), (1, 2)])
def test_one_step_off_goes_on_with_as_many_ranks(processes: tuple[int, int], tmp_path: Path) -> None:
    """Others' answers are in ledgers of their own: with fewer ranks half a batch would be trained without a word."""
    before, after = processes
    config = small(tmp_path / "run", ONE, nproc_per_node=before, steps=2, save_every=2, eval_every=2)
    run(config, RECIPE)
    logged = rows(tmp_path / "run")
    with pytest.raises((ValueError, RankError), match=f"go on with --nproc-per-node {before}, not {after}"):
        run(replace(config, nproc_per_node=after, resume=True, steps=4), RECIPE)
    assert rows(tmp_path / "run") == logged
    run(replace(config, resume=True, steps=3), RECIPE)


@pytest.mark.parametrize("schedule", [ONE, ASYNC], ids=lambda schedule: schedule.mode)
def test_what_runs_ahead_does_not_take_over_from_a_run_in_turn(schedule: ScheduleConfig, tmp_path: Path) -> None:
    config = small(tmp_path / "run", ScheduleConfig(), steps=2, save_every=2, eval_every=2)
    run(config, RECIPE)
    with pytest.raises(ValueError, match=r"has no ledger.*begun under sync \(go on with --schedule.mode sync\)"):
        run(replace(config, cluster=Cluster(schedule=schedule), resume=True, steps=3), RECIPE)


def test_fully_async_shows_what_is_in_flight_and_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampling process is asked, and its answer is shown at the next look."""
    monkeypatch.setattr(looks, "EVERY", 3600)  # the test looks itself
    shown: list[dict[str, Any]] = []
    train = FullyAsyncSchedule._train

    def looked_at(self: FullyAsyncSchedule, *arguments: Any) -> Any:
        self._show = lambda values: shown.append(dict(values))
        self._show_live()
        for future in self._load._asked:
            future.result(60)
        self._show_live()
        return train(self, *arguments)

    monkeypatch.setattr(FullyAsyncSchedule, "_train", looked_at)
    run(small(tmp_path / "run", ASYNC, steps=1), RECIPE)
    assert set(shown[0]) == {"queue", "sampling", "staleness"}
    assert set(shown[1]) == {"queue", "sampling", "staleness", "episodes", "requests"}
    assert shown[1]["episodes"].endswith(" in flight")
    assert shown[1]["requests"].endswith(" waiting")


def test_fully_async_samples_ahead_as_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the mode alone: half of the next step's groups are begun before this step is trained, with weights."""
    begun: list[int] = []
    cut: list[tuple[float, float]] = []
    train, held = FullyAsyncSchedule._train, SamplerLane.held

    def looked_at(self: FullyAsyncSchedule, decision: Train, since: float) -> TrainStepResult:
        begun.append(self._controller.state.next)
        return train(self, decision, since)

    def noted(self: SamplerLane, begin: float, end: float) -> None:
        cut.append((begin, end))
        held(self, begin, end)

    monkeypatch.setattr(FullyAsyncSchedule, "_train", looked_at)
    monkeypatch.setattr(SamplerLane, "held", noted)
    config = small(tmp_path / "run", ScheduleConfig("fully_async"), steps=3, eval_every=3, save_every=3)
    run(config, RECIPE)
    prompts = config.prompts_per_step
    assert begun == [prompts + prompts // 2, 2 * prompts + prompts // 2, 3 * prompts]
    pauses = [row["weights/pause_ms"] for row in rows(tmp_path / "run")[1:]]
    assert [1000 * (end - begin) for begin, end in cut] == pytest.approx(pauses)  # the sampler's lane shows them
    assert_timed(rows(tmp_path / "run")[1:])
    assert max(row["train/off_policy/weight"] for row in rows(tmp_path / "run")[1:]) > 0  # 0 where no group teaches
    assert "off-policy weights: mask" in capsys.readouterr().out
    assert_trained(tmp_path / "run")


def test_what_is_in_flight_is_shown_while_training_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step's training waits until three looks have been told amid it, the sampling process's answer too."""
    told: list[Mapping[str, Any]] = []
    train, enough = step.train_on, threading.Event()
    tell = Reporter.live

    def watch(self: Reporter, values: Mapping[str, Any]) -> None:
        tell(self, values)
        told.append(values)
        if len(told) > 2 and "episodes" in values:
            enough.set()

    def hold(*arguments: Any) -> Any:
        told.clear()
        assert enough.wait(120), "nothing is shown while this process trains"
        return train(*arguments)

    monkeypatch.setattr(Reporter, "live", watch)
    monkeypatch.setattr(step, "train_on", hold)
    run(small(tmp_path / "run", ASYNC, steps=1, eval_every=1), RECIPE)
    assert {"queue", "sampling", "staleness", "episodes", "requests"} == set(told[-1])
    assert not [thread for thread in threading.enumerate() if thread.name == "live"]


def test_a_run_shows_what_its_sampling_process_has_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the progress line of a whole run is told: the first step's sixteen end once the line has said so."""
    told, gate, live = [], tmp_path / "gate", Reporter.live

    def watch(self: Reporter, values: Mapping[str, Any]) -> None:
        told.append(values.get("episodes"))
        if told[-1] == "16 in flight":
            gate.touch()
        live(self, values)

    monkeypatch.setattr(Reporter, "live", watch)
    config = small(tmp_path / "run", ScheduleConfig("fully_async"), steps=1, eval_every=1)
    run(config, replace(RECIPE, make_tasks=lambda config, _: HeldTasks(config.data.eval_prompts, gate=gate)))
    assert "16 in flight" in told
    assert rows(tmp_path / "run")[1]["train/trained_tokens"] > 0


def test_a_sampling_process_with_other_weights_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took what it got, and says that it has the new weights; those that it has are proven at each hand-over."""
    plain = WorkerProcess.receive

    async def receive(self: WorkerProcess, bucket: Bucket) -> int:
        other = Bucket(bucket.headers, bucket.buffer.clone())
        for header in other.headers:
            end = header.start + header.numel * header.dtype.itemsize
            other.buffer[header.start : end].view(header.dtype).mul_(1.5)
        return await plain(self, other)

    monkeypatch.setattr(WorkerProcess, "receive", receive)
    with pytest.raises(WeightsNotTakenError, match="log-probs of the sampler, of version 1"):
        run(small(tmp_path / "run", ASYNC), RECIPE)


def test_hung_environment_and_tool_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither wedges the run: a limit ends the episode, and the group is trained with what it has."""
    limits = {"max_episode_seconds": 8.0, "environment_processes": 0}  # no start of a process counts against the limit
    config = small(tmp_path / "run", ASYNC, steps=3, max_turns=1, **limits)
    config = replace(config, data=replace(config.data, eval_prompts=2), save_every=3, eval_every=3)
    trained, plain = list[AnyEpisode](), FullyAsyncSchedule._train

    def train(self: FullyAsyncSchedule, decision: Train, begun: float) -> TrainStepResult:
        result = plain(self, decision, begun)
        trained.extend(result.episodes)
        return result

    monkeypatch.setattr(FullyAsyncSchedule, "_train", train)
    run(config, replace(RECIPE, make_tasks=make_hang_tasks))
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2, 3]
    found = {
        (int(e.task_id[7:]), e.end == "deadline", e.score and e.score.reward_components["timed_out"]) for e in trained
    }
    # Two held out, then three steps of four. In multiples of five the environment hangs before it calls a tool.
    assert found == {(n, True, 0) if n % 5 == 0 else (n, False, n % 2) for n in range(2, 14)}
    assert {row["rollout/failed_episodes"] for row in rows(tmp_path / "run")[1:]} == {0}
    assert len(trained) == 48


def test_ray_is_refused_where_it_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = configure(["--rollout.ray-workers", "2", "--rollout.ray-cpus", "0.5"])
    assert layout.cluster.rollout.ray_workers == 2
    monkeypatch.setitem(sys.modules, "rollout.workers.ray_pool", None)
    with pytest.raises(ValueError, match=r"ray-workers needs ray .*//apps/grpo:ray.*tessera-rollout\[ray\]"):
        run(replace(layout, run_dir=tmp_path / "run"), RECIPE)
    assert not (tmp_path / "run").exists()


def test_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert configure(["--schedule", "one_step_off"]).cluster.schedule.mode == "one_step_off"
    assert (
        configure(["--schedule", "fully_async", "--nproc-per-node", "2"]).nproc_per_node == 2
    )  # run by schedule_ranks_test
    for words, says in (
        (["--schedule", "fully_async", "--schedule.parameter-sync-step", "7"], "must be a multiple of"),
        (["--schedule.staleness-threshold", "1"], "no effect with mode 'sync'"),
    ):
        with pytest.raises(SystemExit):
            cli.main(partial(configure, words))
        assert says in " ".join(capsys.readouterr().err.replace("\u2502", " ").split())
