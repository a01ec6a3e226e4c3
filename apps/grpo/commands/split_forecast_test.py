"""Forecasts from runs' files: what they are made from, and what they are held to."""

import json
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from apps.common.cluster import Cluster, RolloutLayout
from apps.common.run.config_file import CONFIG_NAME, dump_config
from apps.grpo.commands.split_forecast import (
    ForecastCheck,
    fit_first_half,
    main,
    make_workload,
    max_concurrent_answers,
    sampling_seconds,
    staleness_settings,
    step_ends,
)
from apps.grpo.config import GrpoConfig
from rollout import RolloutConfig
from rollout.control.settings import StalenessSettings
from rollout.control.simulation import Workload, choose_pools, simulate
from runlog import read_episodes, read_metrics
from runlog.store import EPISODES, METRICS
from runlog.timeline import LANE, MOST_SPANS, TIMELINE, WIDTH, Span, read_timeline
from schedules.config import ScheduleConfig

STEPS, LENGTH, SAMPLE, TRAIN, SYNC = 8, 100, 2.0, 1.5, 0.25
ASYNC = ScheduleConfig("fully_async", staleness_threshold=1.0)


def written(run_dir: Path, schedule: ScheduleConfig, slower: float = 1.0) -> GrpoConfig:
    """The files of a run whose answers all have `LENGTH` tokens; the second half takes `slower` times as long."""
    base = GrpoConfig()
    config = replace(
        base, steps=STEPS, prompts_per_step=4, group_size=4, cluster=replace(base.cluster, schedule=schedule)
    )
    run_dir.mkdir()
    now, metrics, spans, episodes = 0.0, [{"step": 0, "eval/accuracy": 0.5}], [], []
    overlapped = schedule.mode != "sync"
    if overlapped:
        spans.append(("sampler", "sample", 0.0, SAMPLE))
        now = SAMPLE
    for step in range(1, STEPS + 1):
        factor = slower if step > STEPS // 2 else 1.0
        train, sample, sync = factor * TRAIN, factor * SAMPLE, factor * SYNC
        started = now
        if overlapped:
            spans += [("trainer", "train", now, now + train), ("sampler", "sample", now, now + sample)]
            now += max(train, sample)
            times = {"time/wait_for_rollout_s": max(0.0, sample - train)}
        else:
            now += sample + train
            times = {"time/rollout_s": sample}
        spans.append(("weights", "sync", now, now + sync))
        now += sync
        times |= {"time/train_s": train, "time/export_and_update_weights_s": sync, "time/step_s": now - started}
        metrics.append({"step": step, "response/length_max": LENGTH, "rollout/sampled_tokens": 16 * LENGTH, **times})
        episodes += [{"step": step, "mask": [0, 0] + [1] * LENGTH}] * 4
    named = [dict(zip(("lane", "kind", "begin", "end"), span, strict=True)) for span in spans]
    for name, lines in ((METRICS, metrics), (EPISODES, episodes), (TIMELINE, named if overlapped else [])):
        (run_dir / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return config


def forecast(run_dir: Path, config: GrpoConfig) -> tuple[Workload, ForecastCheck]:
    return fit_first_half(config, read_metrics(run_dir), read_episodes(run_dir), read_timeline(run_dir))


@pytest.mark.parametrize("schedule", [ScheduleConfig(), ScheduleConfig("one_step_off"), ASYNC], ids=lambda s: s.mode)
def test_the_same_work_is_found_whether_it_overlapped_or_not(tmp_path: Path, schedule: ScheduleConfig) -> None:
    workload, _ = forecast(tmp_path / "run", written(tmp_path / "run", schedule))
    seconds = workload.decode_s * LENGTH + workload.row_s * 16 * LENGTH
    assert seconds == pytest.approx(SAMPLE)
    assert workload.row_s * 16 * LENGTH > 0.99 * SAMPLE  # one load was seen: no part of it is free
    assert workload.token_s == pytest.approx(TRAIN / (16 * LENGTH))
    assert workload.sync_s == pytest.approx(SYNC)
    assert set(workload.lengths) == {LENGTH}


@pytest.mark.parametrize(
    ("schedule", "seconds"),
    [(ScheduleConfig(), SAMPLE + TRAIN + SYNC), (ScheduleConfig("one_step_off"), max(SAMPLE, TRAIN) + SYNC)],
    ids=["in turn", "one step off"],
)
def test_a_run_is_held_to_the_half_that_the_figures_have_not_seen(
    tmp_path: Path, schedule: ScheduleConfig, seconds: float
) -> None:
    steady = forecast(tmp_path / "a", written(tmp_path / "a", schedule))[1]
    assert steady.measured == pytest.approx(seconds)
    assert steady.forecast == pytest.approx(seconds, rel=0.1)
    slowed = forecast(tmp_path / "b", written(tmp_path / "b", schedule, slower=3.0))[1]
    assert slowed.measured == pytest.approx(3 * seconds)
    assert slowed.forecast == pytest.approx(steady.forecast)
    assert "(-6" in slowed.text


@pytest.mark.parametrize("train", [0.5, 5.0])
def test_one_step_off_waits_for_the_longer_of_the_two(tmp_path: Path, train: float) -> None:
    config = written(tmp_path / "run", ScheduleConfig("one_step_off"))
    workload, _ = forecast(tmp_path / "run", config)
    workload = replace(workload, token_s=train / (16 * LENGTH))
    ends = step_ends(config, workload)
    assert ends == pytest.approx([SAMPLE + train + k * (max(SAMPLE, train) + SYNC) for k in range(STEPS)])


def test_sampling_is_counted_once_and_between_the_same_points_of_two_steps() -> None:
    """Two samplers side by side, one span over three steps, an evaluation that counts as nothing."""
    trains = [Span("trainer", "train", at, at + 1) for at in (3.0, 7.0, 11.0)]
    spans = [*trains, Span("trainer", "evaluate", 4.5, 6.5), Span("sampler", "sample", 0.0, 6.0)]
    spans += [Span("sampler", "sample", 5.0, 7.5), Span("sampler", "sample", 10.0, 14.0)]
    assert sampling_seconds(spans, 2) == pytest.approx((4.5 + 1.0) / 2)
    for given, says in ((spans[:2], "2 steps"), (trains, "nobody samples")):
        with pytest.raises(ValueError, match=says):
            sampling_seconds(given, 2)


def test_the_fastest_split_is_drawn_as_a_report_draws_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page that the command writes: a bar for each span, where and as long as the span is, in its lane."""
    run_dir = tmp_path / "run"
    config = written(run_dir, ASYNC)
    (run_dir / CONFIG_NAME).write_text(dump_config(config))
    monkeypatch.setattr(sys, "argv", ["forecast", str(run_dir), "--devices", "4"])
    main()
    printed = capsys.readouterr().out
    assert f"the fastest, drawn: {run_dir / 'forecast.html'}" in printed
    page = (run_dir / "forecast.html").read_text()
    drawing = ET.fromstring(page[page.index("<figure") :])
    workload, _ = fit_first_half(config, read_metrics(run_dir), read_episodes(run_dir), read_timeline(run_dir))
    settings = StalenessSettings(config.prompts_per_step, config.steps, staleness_threshold=1.0, partial_rollout=True)
    assert settings == staleness_settings(config)
    spans = [Span(*span) for span in choose_pools(settings, workload, 4)[0].spans]
    bars = list(drawing.iter("rect"))
    assert {span.lane for span in spans} == {"sampler", "trainer", "weights"}
    assert len(bars) == len(spans) <= MOST_SPANS
    whole = max(span.end for span in spans) - min(span.begin for span in spans)
    lanes = list(dict.fromkeys(span.lane for span in spans))
    expected = sorted(
        (lanes.index(s.lane), s.begin / whole, max(0.5 / (WIDTH), (s.end - s.begin) / whole)) for s in spans
    )
    places = [{name: float(bar.attrib[name]) for name in ("x", "y", "width")} for bar in bars]
    scale = WIDTH
    actual = sorted((p["y"] // LANE, p["x"] / scale, p["width"] / scale) for p in places)
    for bar, span in zip(actual, expected, strict=True):
        assert bar == pytest.approx(span, abs=1e-3)


PROMPTS, ANSWERS = 16, 8


def simulated(run_dir: Path, truth: Workload, steps: int = 12) -> GrpoConfig:
    """The files of a run in turn of one sampler and one trainer that are as fast as `truth` says."""
    config = replace(GrpoConfig(), steps=steps, prompts_per_step=PROMPTS, group_size=ANSWERS, run_dir=run_dir)
    run_dir.mkdir()
    metrics: list[dict[str, Any]] = []
    episodes: list[dict[str, Any]] = []
    draw = random.Random(0)
    for step in range(1, steps + 1):
        lengths = draw.choices(truth.lengths, k=PROMPTS * ANSWERS)
        sampled = sum(truth.decode_s + truth.row_s * sum(n > at for n in lengths) for at in range(max(lengths)))
        trained = truth.token_s * sum(lengths)
        metrics.append(
            {
                "step": step,
                "response/length_max": max(lengths),
                "rollout/sampled_tokens": sum(lengths),
                "time/rollout_s": sampled,
                "time/train_s": trained,
                "time/export_and_update_weights_s": truth.sync_s,
                "time/step_s": sampled + trained + truth.sync_s,
            }
        )
        episodes += [{"step": step, "mask": [1] * n} for n in lengths]
    for name, lines in ((METRICS, metrics), (EPISODES, episodes)):
        (run_dir / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run_dir / CONFIG_NAME).write_text(dump_config(config))
    return config


TAILED = tuple(min(400, int(random.Random(n).lognormvariate(3.5, 0.8)) + 1) for n in range(400))
TOKENS = PROMPTS * ANSWERS * sum(TAILED) / len(TAILED)
"""Of a step, on average."""


def truth_of(sampling: float, training: float, free: float) -> Workload:
    """Seconds of a step's sampling and training, a device each; `free`: the share of sampling that no row adds to."""
    return Workload(
        TAILED,
        ANSWERS,
        RolloutConfig.max_batch,
        decode_s=max(1e-9, free * sampling / max(TAILED)),
        row_s=(1 - free) * sampling / TOKENS,
        token_s=training / TOKENS,
        sync_s=0.1,
    )


@pytest.mark.parametrize(
    ("sampling", "training", "generators"), [(30.0, 1.0, {6, 7}), (1.0, 30.0, {1, 2}), (6.0, 6.0, {3, 4, 5})]
)
def test_the_pools_follow_what_a_run_waited_for(
    sampling: float, training: float, generators: set[int], tmp_path: Path
) -> None:
    config = simulated(tmp_path / "run", truth_of(sampling, training, free=0.0))
    workload, _ = forecast(tmp_path / "run", config)
    assert choose_pools(staleness_settings(config), workload, 8)[0].generators in generators


@pytest.mark.parametrize("free", [0.05, 0.5, 0.9])
def test_two_known_pools_are_told_apart_by_a_run_on_one_of_each(free: float, tmp_path: Path) -> None:
    """How much faster a larger pool samples hangs on what no row adds to: steps of different loads tell."""
    truth = truth_of(20.0, 5.0, free)
    config = simulated(tmp_path / "run", truth)
    workload, _ = forecast(tmp_path / "run", config)
    settings = staleness_settings(config)
    for pools in ((2, 6), (6, 2)):
        known, told = (simulate(settings, work, *pools).seconds for work in (truth, workload))
        assert told == pytest.approx(known, rel=0.1)
    assert workload.decode_s == pytest.approx(truth.decode_s, rel=0.05)
    assert workload.row_s == pytest.approx(truth.row_s, rel=0.05)


def test_the_run_is_simulated_by_its_own_bounds() -> None:
    schedule = ScheduleConfig("fully_async", 0.25, 2, 3, partial_rollout=False)
    config = replace(GrpoConfig(), prompts_per_step=8, eval_every=2, save_every=2, cluster=Cluster(schedule=schedule))
    assert staleness_settings(config) == StalenessSettings(8, config.steps, 0.25, 2, 3, partial_rollout=False)
    assert staleness_settings(config, 1.5) == StalenessSettings(8, config.steps, 1.5, 2, 3, partial_rollout=False)
    turn = replace(config, cluster=Cluster())
    assert staleness_settings(turn) == StalenessSettings(8, config.steps, 0.5, partial_rollout=True)
    layout = RolloutLayout("vllm", max_requests=96)
    assert max_concurrent_answers(replace(config, cluster=Cluster(rollout=layout))) == 96


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    config = written(tmp_path / "run", ScheduleConfig("one_step_off"))
    metrics, episodes = read_metrics(tmp_path / "run"), read_episodes(tmp_path / "run")
    with pytest.raises(ValueError, match="at least two steps"):
        fit_first_half(config, metrics[:2], episodes, ())
    with pytest.raises(ValueError, match="kept episodes"):
        fit_first_half(config, metrics, [], read_timeline(tmp_path / "run"))
    with pytest.raises(ValueError, match="timeline has 0 steps"):
        make_workload(config, metrics, [LENGTH])
