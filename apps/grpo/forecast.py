"""What a split of devices would bring, from a run's own figures: simulated before a cluster is rented.

python -m apps.grpo.forecast RUN_DIR --devices 8

1. The run's lengths and rates become a `rollout.control.simulation.Workload`: kept episodes give the lengths, metrics
   the seconds of a decoded token, of a trained one and of a transfer.
2. The run's own schedule is simulated first and stands beside what was measured: how far to trust the rest.
3. Every split of the devices is simulated with the controller that would drive it; the best is drawn.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from apps.common.config_file import CONFIG_NAME, load_config
from apps.grpo.config import GrpoConfig
from apps.grpo.schedule_async import settings_of
from rollout.control.settings import StalenessSettings
from rollout.control.simulation import Forecast, Workload, choose_pools, forecast_table, in_turn, simulate
from runlog import read_episodes, read_metrics
from runlog.timeline import Span, timeline_svg


@dataclass(frozen=True)
class Compared:
    """Seconds a step of a run, as measured and as simulated from its own figures."""

    measured: float
    forecast: float

    @property
    def text(self) -> str:
        """Both, side by side."""
        off = self.forecast / self.measured - 1
        return f"seconds a step: measured {self.measured:.3f}, forecast {self.forecast:.3f} ({off:+.0%})"


def workload_of(config: GrpoConfig, metrics: Sequence[Mapping[str, Any]], lengths: Sequence[int]) -> Workload:
    """The work of a run with these rows of metrics (steps only) and these lengths of answers.

    Sampling's seconds are shared out over the tokens of the longest answer, the only one that never waits. Where a
    schedule does not tell them, they are those that a step waited for.

    Raises:
        ValueError: the run has no step or kept no episode yet.
    """
    rows = [row for row in metrics if row.get("time/train_s") is not None]
    if not rows or not lengths:
        raise ValueError("a forecast needs at least one step of a run, and its kept episodes (--keep-groups)")
    sampling = [row.get("time/rollout_s", row.get("time/wait_for_rollout_s", 0.0)) for row in rows]
    longest = fmean(row["response/length_max"] for row in rows)
    tokens = fmean(row["rollout/sampled_tokens"] for row in rows)
    return Workload(
        lengths=tuple(lengths),
        group_size=config.group_size,
        slots=config.prompts * config.group_size,
        decode_s=max(1e-9, fmean(sampling) / longest),
        row_s=0.0,
        train_s=0.0,
        token_s=fmean(row["time/train_s"] for row in rows) / tokens,
        sync_s=fmean(row.get("time/export_and_update_weights_s", 0.0) for row in rows),
    )


def answer_lengths(episodes: Sequence[Mapping[str, Any]]) -> list[int]:
    """Sampled tokens of each kept training episode that was not empty."""
    return [n for e in episodes if e.get("split", "training") == "training" and (n := sum(e.get("mask", ()))) > 0]


def compared(config: GrpoConfig, metrics: Sequence[Mapping[str, Any]], workload: Workload) -> Compared:
    """The run's own schedule, simulated on one sampler and one trainer, beside what it took."""
    rows = [row for row in metrics if row.get("time/step_s") is not None]
    settings = run_settings(config)
    forecast = simulate(settings, workload)
    return Compared(fmean(row["time/step_s"] for row in rows), forecast.seconds / settings.total_steps)


def run_settings(config: GrpoConfig) -> StalenessSettings:
    """The bounds of a run's schedule; one step off is a window ahead, without interruptions."""
    mode = config.cluster.schedule.mode
    settings = settings_of(config)
    if mode == "fully_async":
        return settings
    return in_turn(settings)


def picture(forecast: Forecast) -> str:
    """The forecast's timeline, as the report draws a run's."""
    return timeline_svg([Span(*span) for span in forecast.spans])


def main() -> None:
    """Print the comparison and the table of splits, and write the best one's picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--devices", type=int, default=8, help="of both pools together")
    parser.add_argument("--staleness", type=float, default=1.0, help="the threshold of the asynchronous schedule")
    options = parser.parse_args()
    config = load_config(GrpoConfig, options.run_dir / CONFIG_NAME)
    metrics = read_metrics(options.run_dir)
    workload = workload_of(config, metrics, answer_lengths(read_episodes(options.run_dir)))
    print(compared(config, metrics, workload).text)
    ahead = StalenessSettings(config.prompts, config.steps, staleness_threshold=options.staleness, partial_rollout=True)
    splits = choose_pools(ahead, workload, options.devices)
    print(forecast_table(splits))
    path = options.run_dir / "forecast.html"
    path.write_text(f"<!doctype html><meta charset=utf-8>{picture(splits[0])}\n", encoding="utf-8")
    print(f"the fastest, drawn: {path}")


if __name__ == "__main__":
    main()
