"""A forecast of a run with another split of devices, simulated from the run's own figures.

python -m apps.grpo.commands.split_forecast RUN_DIR --devices 8

1. The first half of the run's steps becomes a `rollout.control.simulation.Workload`: kept episodes give the lengths,
   metrics and timeline the seconds of a decoded token, of a trained one and of a weight sync (`.decode_cost`).
2. The run's own schedule is simulated with it and compared with the second half, which the figures have not seen: how
   far to trust the rest.
3. Every split of the devices is simulated with the controller that would drive it; the best is drawn.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from apps.common.run.config_file import CONFIG_NAME, load_config
from apps.grpo.commands.decode_cost import DecodeLoad, fit_decode_cost
from apps.grpo.config import GrpoConfig
from rollout import RolloutConfig
from rollout.control.settings import StalenessSettings
from rollout.control.simulation import Forecast, Workload, choose_pools, forecast_table, in_turn, simulate
from runlog import read_episodes, read_metrics
from runlog.timeline import Span, busy_seconds, read_timeline, timeline_figure
from schedules.config import ScheduleConfig
from schedules.fully_async import async_state


@dataclass(frozen=True)
class ForecastCheck:
    """The seconds a step of a run, as measured and as simulated."""

    measured: float
    forecast: float

    @property
    def text(self) -> str:
        """The line that shows both."""
        off = self.forecast / self.measured - 1
        return f"seconds a step: measured {self.measured:.3f}, forecast {self.forecast:.3f} ({off:+.0%})"


def make_workload(
    config: GrpoConfig, metrics: Sequence[Mapping[str, Any]], lengths: Sequence[int], spans: Sequence[Span] = ()
) -> Workload:
    """Return the workload of a run from its metrics (rows of steps only) and the lengths of its responses.

    Sampling and training are told apart by each step's own seconds where it has them, and by `spans`, the run's
    timeline, where they overlap. `fit_decode_cost` says how decoding grows with its rows.

    Raises:
        ValueError: the run has no step or kept no episode yet, or its timeline is missing.
    """
    rows = _steps(metrics)
    if not rows or not lengths:
        raise ValueError("a forecast needs at least two steps of a run, and its kept episodes (--logging.groups)")
    slots = max_concurrent_answers(config)
    decode_s, row_s = fit_decode_cost(_loads(rows, slots), _sampled(config, rows, spans))
    return Workload(
        lengths=tuple(lengths),
        group_size=config.group_size,
        slots=slots,
        decode_s=max(1e-9, decode_s),
        row_s=row_s,
        train_s=0.0,
        token_s=fmean(row["time/train_s"] for row in rows) / fmean(row["rollout/sampled_tokens"] for row in rows),
        sync_s=fmean(row.get("time/export_and_update_weights_s", 0.0) for row in rows),
    )


def max_concurrent_answers(config: GrpoConfig) -> int:
    """Return the most responses that one sampler decodes together."""
    return config.cluster.rollout.max_requests or RolloutConfig.max_batch


def _loads(rows: Sequence[Mapping[str, Any]], slots: int) -> list[DecodeLoad]:
    """Return the load of each step: at least as many passes as its longest response has tokens or its slots need."""
    return [
        DecodeLoad(
            max(row["response/length_max"], row["rollout/sampled_tokens"] / slots), row["rollout/sampled_tokens"]
        )
        for row in rows
    ]


def _sampled(config: GrpoConfig, rows: Sequence[Mapping[str, Any]], spans: Sequence[Span]) -> list[float]:
    """Return the seconds of sampling of each step; the mean of all where responses of several steps overlap."""
    measured = [row["time/rollout_s"] for row in rows if "time/rollout_s" in row]
    if len(measured) == len(rows):
        return measured
    seconds = sampling_seconds(spans, len(rows))
    each = sorted(span for span in spans if span.kind == "sample")[: len(rows)]
    if config.cluster.schedule.mode == "one_step_off" and len(each) == len(rows):
        return [span.end - span.begin for span in each]  # one span a step, in their order
    return [seconds] * len(rows)


def sampling_seconds(spans: Sequence[Span], steps: int) -> float:
    """Return the mean seconds of sampling a step, over the first `steps` steps of a timeline.

    Counted from the first step's training to that of the step after the last one, when as many responses are sampled
    ahead.

    Raises:
        ValueError: the timeline has fewer steps, or no sampling.
    """
    trained = sorted(span.begin for span in spans if (span.lane, span.kind) == ("trainer", "train"))
    if len(trained) <= steps:
        raise ValueError(f"the timeline has {len(trained)} steps, a forecast from {steps} needs one more")
    begin, end = trained[0], trained[steps]
    inside = [s for s in spans if s.kind == "sample" and s.end > begin and s.begin < end]
    if not inside:
        raise ValueError("nobody samples in the timeline: a forecast needs that of the whole run")
    return busy_seconds(s._replace(begin=max(s.begin, begin), end=min(s.end, end)) for s in inside) / steps


def answer_lengths(episodes: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the number of sampled tokens of each kept training episode that is not empty."""
    return [n for e in episodes if e.get("split", "training") == "training" and (n := sum(e.get("mask", ()))) > 0]


def fit_first_half(
    config: GrpoConfig,
    metrics: Sequence[Mapping[str, Any]],
    episodes: Sequence[Mapping[str, Any]],
    spans: Sequence[Span],
) -> tuple[Workload, ForecastCheck]:
    """Return the workload of the first half of a run's steps, and its forecast of the second half beside the measured
    one.

    Raises:
        ValueError: see `make_workload`.
    """
    rows = _steps(metrics)
    first_half = rows[: len(rows) // 2]
    known = [e for e in episodes if first_half and e["step"] <= first_half[-1]["step"]]
    workload = make_workload(config, first_half, answer_lengths(known), spans)
    return workload, check_forecast(config, rows[len(first_half) :], workload)


def check_forecast(config: GrpoConfig, metrics: Sequence[Mapping[str, Any]], workload: Workload) -> ForecastCheck:
    """Return the measured and the simulated seconds a step of the run's second half, on one sampler and one trainer."""
    ends = step_ends(config, workload)
    half = len(ends) // 2
    begin = ends[half - 1] if half else 0.0
    return ForecastCheck(fmean(row["time/step_s"] for row in _steps(metrics)), (ends[-1] - begin) / (len(ends) - half))


def step_ends(config: GrpoConfig, workload: Workload) -> list[float]:
    """Return the simulated times at which the steps of the run's schedule are trained.

    The controller does not simulate one step off: a step's responses are begun together when the step before begins to
    train, and weights are synced when both are done. Its parts are those of the synchronous run.
    """
    settings, mode = _run_settings(config), config.cluster.schedule.mode
    simulated = simulate(settings if mode == "fully_async" else in_turn(settings), workload)
    if mode != "one_step_off":
        return [span.end for span in simulated.spans if span.kind == "train"]
    parts = {kind: [s.end - s.begin for s in simulated.spans if s.kind == kind] for kind in ("sample", "train", "sync")}
    now, ends = parts["sample"][0], []
    for training, sampling, sync in zip(parts["train"], [*parts["sample"][1:], 0.0], parts["sync"], strict=True):
        ends.append(now + training)
        now += max(training, sampling) + sync
    return ends


def _steps(metrics: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in metrics if row.get("time/train_s") is not None]


def timeline_image(forecast: Forecast) -> str:
    """Return the forecast's timeline as an HTML figure, drawn as in a run's report."""
    return timeline_figure([Span(*span) for span in forecast.spans])


def staleness_settings(config: GrpoConfig, staleness: float | None = None) -> StalenessSettings:
    """Return the staleness settings of the run, or of its fully async form; `staleness` replaces its own threshold."""
    cluster = config.cluster
    if cluster.schedule.mode != "fully_async":
        config = replace(config, cluster=replace(cluster, schedule=ScheduleConfig("fully_async")))
    settings = _run_settings(config)
    return settings if staleness is None else replace(settings, staleness_threshold=staleness)


def _run_settings(config: GrpoConfig) -> StalenessSettings:
    return async_state.staleness_settings(config.cluster.schedule, config.prompts_per_step, config.steps)


def main() -> None:
    """Print the comparison and the table of splits, and write the timeline of the best one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--devices", type=int, default=8, help="of both pools together")
    parser.add_argument(
        "--staleness", type=float, help="the threshold of the asynchronous schedule, in place of its own"
    )
    options = parser.parse_args()
    config = load_config(GrpoConfig, options.run_dir / CONFIG_NAME)
    metrics = read_metrics(options.run_dir)
    workload, check = fit_first_half(config, metrics, read_episodes(options.run_dir), read_timeline(options.run_dir))
    print(check.text)
    splits = choose_pools(staleness_settings(config, options.staleness), workload, options.devices)
    print(forecast_table(splits))
    path = options.run_dir / "forecast.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{timeline_image(splits[0])}\n", encoding="utf-8")
    print(f"the fastest, drawn: {path}")


if __name__ == "__main__":
    main()
