"""What a split of devices would bring, from a run's own figures: simulated before a cluster is rented.

python -m apps.grpo.commands.split_forecast RUN_DIR --devices 8

1. The first half of the run's steps becomes a `rollout.control.simulation.Workload`: kept episodes give the lengths,
   metrics and timeline the seconds of a decoded token, of a trained one and of a transfer (`apps.grpo.commands.decode_cost`).
2. The run's own schedule is simulated with it and stands beside the second half, which the figures have not seen: how
   far to trust the rest.
3. Every split of the devices is simulated with the controller that would drive it; the best is drawn.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from apps.common.cluster import Schedule
from apps.common.run.config_file import CONFIG_NAME, load_config
from apps.grpo.commands.decode_cost import Load, fitted
from apps.grpo.config import GrpoConfig
from apps.grpo.schedules.async_state import settings_of
from rollout import RolloutConfig
from rollout.control.settings import StalenessSettings
from rollout.control.simulation import Forecast, Workload, choose_pools, forecast_table, in_turn, simulate
from runlog import read_episodes, read_metrics
from runlog.timeline import Span, busy_seconds, read_timeline, timeline_svg


@dataclass(frozen=True)
class Compared:
    """Seconds a step of a run, as measured and as simulated."""

    measured: float
    forecast: float

    @property
    def text(self) -> str:
        """Both, side by side."""
        off = self.forecast / self.measured - 1
        return f"seconds a step: measured {self.measured:.3f}, forecast {self.forecast:.3f} ({off:+.0%})"


def workload_of(
    config: GrpoConfig, metrics: Sequence[Mapping[str, Any]], lengths: Sequence[int], spans: Sequence[Span] = ()
) -> Workload:
    """Return the work of a run with these rows of metrics (steps only) and these lengths of answers.

    Sampling and training are told apart by each step's own seconds where it has them, and by `spans`, the run's
    timeline, where they overlap. How decoding grows with its rows is `fitted`.

    Raises:
        ValueError: the run has no step or kept no episode yet, or its timeline is missing.
    """
    rows = _steps(metrics)
    if not rows or not lengths:
        raise ValueError("a forecast needs at least two steps of a run, and its kept episodes (--keep-groups)")
    slots = together(config)
    decode_s, row_s = fitted(_loads(rows, slots), _sampled(config, rows, spans))
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


def together(config: GrpoConfig) -> int:
    """Return answers that one sampler decodes side by side, at most."""
    return config.cluster.rollout.max_requests or RolloutConfig.max_batch


def _loads(rows: Sequence[Mapping[str, Any]], slots: int) -> list[Load]:
    """Return what each step decoded: no fewer times than its longest answer has tokens, nor than its tokens fill the
    slots."""
    return [
        Load(max(row["response/length_max"], row["rollout/sampled_tokens"] / slots), row["rollout/sampled_tokens"])
        for row in rows
    ]


def _sampled(config: GrpoConfig, rows: Sequence[Mapping[str, Any]], spans: Sequence[Span]) -> list[float]:
    """Return the seconds in which each step's answers were sampled; the mean of all where answers of several steps
    overlap."""
    found = [row["time/rollout_s"] for row in rows if "time/rollout_s" in row]
    if len(found) == len(rows):
        return found
    seconds = sampling_seconds(spans, len(rows))
    each = sorted(span for span in spans if span.kind == "sample")[: len(rows)]
    if config.cluster.schedule.mode == "one_step_off" and len(each) == len(rows):
        return [span.end - span.begin for span in each]  # one span a step, in their order
    return [seconds] * len(rows)


def sampling_seconds(spans: Sequence[Span], steps: int) -> float:
    """Return how long a step's answers were sampled, on average over the first `steps` steps of a timeline.

    Counted from the first step's training to that of the step after the last one, when just as many answers are ahead.

    Raises:
        ValueError: the timeline has fewer steps, or nobody samples in it.
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
    """Return sampled tokens of each kept training episode that was not empty."""
    return [n for e in episodes if e.get("split", "training") == "training" and (n := sum(e.get("mask", ()))) > 0]


def halves(
    config: GrpoConfig,
    metrics: Sequence[Mapping[str, Any]],
    episodes: Sequence[Mapping[str, Any]],
    spans: Sequence[Span],
) -> tuple[Workload, Compared]:
    """Return the work of the first half of a run's steps, and what it foretells beside what the second half took.

    Raises:
        ValueError: see `workload_of`.
    """
    rows = _steps(metrics)
    fitted = rows[: len(rows) // 2]
    known = [e for e in episodes if fitted and e["step"] <= fitted[-1]["step"]]
    workload = workload_of(config, fitted, answer_lengths(known), spans)
    return workload, compared(config, rows[len(fitted) :], workload)


def compared(config: GrpoConfig, metrics: Sequence[Mapping[str, Any]], workload: Workload) -> Compared:
    """Return the second half of the run's schedule, simulated on one sampler and one trainer, beside what these rows
    took."""
    ends = step_ends(config, workload)
    half = len(ends) // 2
    begin = ends[half - 1] if half else 0.0
    return Compared(fmean(row["time/step_s"] for row in _steps(metrics)), (ends[-1] - begin) / (len(ends) - half))


def step_ends(config: GrpoConfig, workload: Workload) -> list[float]:
    """Return when each step of the run's schedule is trained, in simulated seconds.

    One step off is no case of the controller's: a step's answers are begun together when the step before begins to
    train, and the weights move when both are done. Its parts are those of the run in turn.
    """
    settings, mode = settings_of(config), config.cluster.schedule.mode
    found = simulate(settings if mode == "fully_async" else in_turn(settings), workload)
    if mode != "one_step_off":
        return [span.end for span in found.spans if span.kind == "train"]
    parts = {kind: [s.end - s.begin for s in found.spans if s.kind == kind] for kind in ("sample", "train", "sync")}
    now, ends = parts["sample"][0], []
    for training, sampling, sync in zip(parts["train"], [*parts["sample"][1:], 0.0], parts["sync"], strict=True):
        ends.append(now + training)
        now += max(training, sampling) + sync
    return ends


def _steps(metrics: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in metrics if row.get("time/train_s") is not None]


def picture(forecast: Forecast) -> str:
    """Return the forecast's timeline, as the report draws a run's."""
    return timeline_svg([Span(*span) for span in forecast.spans])


def ahead_of(config: GrpoConfig, staleness: float | None = None) -> StalenessSettings:
    """Return the bounds of the run where it is fully asynchronous, else of what it would be then; `staleness` in place
    of its own threshold."""
    cluster = config.cluster
    if cluster.schedule.mode != "fully_async":
        config = replace(config, cluster=replace(cluster, schedule=Schedule("fully_async")))
    settings = settings_of(config)
    return settings if staleness is None else replace(settings, staleness_threshold=staleness)


def main() -> None:
    """Print the comparison and the table of splits, and write the best one's picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--devices", type=int, default=8, help="of both pools together")
    parser.add_argument(
        "--staleness", type=float, help="the threshold of the asynchronous schedule, in place of its own"
    )
    options = parser.parse_args()
    config = load_config(GrpoConfig, options.run_dir / CONFIG_NAME)
    metrics = read_metrics(options.run_dir)
    workload, found = halves(config, metrics, read_episodes(options.run_dir), read_timeline(options.run_dir))
    print(found.text)
    splits = choose_pools(ahead_of(config, options.staleness), workload, options.devices)
    print(forecast_table(splits))
    path = options.run_dir / "forecast.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{picture(splits[0])}\n", encoding="utf-8")
    print(f"the fastest, drawn: {path}")


if __name__ == "__main__":
    main()
