"""The step time of fully async against sync, on responses with a long tail: the ratio, and the share of the possible
overlap.

python -m apps.grpo.benchmarks.overlap

Both are whole runs of the app, on the same tasks with the same model: one process (sync), then a sampling process
beside the trainer. An untrained model ends its response at each token with the same probability, so that a few
responses of a step are many times as long as most. Weights hardly move, so that both runs sample alike; the lengths of
responses are printed. The possible gain: with sampling and training side by side a step takes the longer of the two.
Cores share their memory and its caches, so the seconds of each are then measured with both cores busy, by two sync runs
at once. Where long responses of several steps overlap, the gain can be larger. Run it on a machine with two free cores.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from apps.grpo.commands.split_forecast import answer_lengths, check_forecast, make_workload
from apps.grpo.config import GrpoConfig
from apps.grpo.main import run
from apps.grpo.recipe import Recipe
from apps.grpo.testing.recipe import RECIPE
from apps.quickstart.model import ensure_tiny_model, tiny_config
from runlog import read_episodes, read_metrics
from runlog.timeline import bubble_shares, read_timeline
from schedules.config import ScheduleConfig

TOKENS = 448
"""Of an answer, at most."""
STOPS = tuple(range(0, 277, 56))
"""An untrained model says all tokens as often: one in 55 ends its answer, and hardly any is cut off."""

WAITS = {
    "waiting for answers": "wait_for_rollout",
    "for probes": "wait_for_weight_checks",
    "training": "train",
    "waiting for a sync": "wait_for_sync",
    "weights": "export_and_update_weights",
}


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's steps but the first, which warms everything up."""
    return [row for row in read_metrics(run_dir) if row["step"] > 1]


def recipe_of(hidden: int) -> Recipe:
    """Return the recipe with a model of this size; its reward is arbitrary."""
    shape = partial(tiny_config, hidden=hidden)
    return replace(RECIPE, make_model=partial(ensure_tiny_model, make_config=shape))


def config_of(options: argparse.Namespace, run_dir: Path, schedule: ScheduleConfig) -> GrpoConfig:
    """Return the configuration of a run without evaluations in between."""
    return replace(
        RECIPE.config,
        run_dir=run_dir,
        steps=options.steps,
        prompts_per_step=options.prompts,
        group_size=options.group_size,
        epochs=options.epochs,
        max_turns=1,
        sampling=replace(RECIPE.config.sampling, max_new_tokens=TOKENS, stop_token_ids=STOPS),
        engine=replace(RECIPE.config.engine, lr=1e-6),
        max_episode_tokens=512,
        eval_every=options.steps,
        save_every=options.steps,
        log_groups=options.prompts,
        data=replace(RECIPE.config.data, eval_prompts=2),
        cluster=replace(RECIPE.config.cluster, schedule=schedule),
    )


def run_quietly(config: GrpoConfig, hidden: int) -> None:
    """Run without output."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        run(config, recipe_of(hidden))


def run_side_by_side(configs: Sequence[GrpoConfig], hidden: int) -> None:
    """Run each configuration in a process of its own, all at once; raise RuntimeError if one fails."""
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=run_quietly, args=(config, hidden)) for config in configs]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise RuntimeError("a run beside another failed: see above")


def main() -> None:
    """Run all configurations and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--staleness", type=float, default=1.0)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=1, help="over each batch (default: 1)")
    parser.add_argument("--hidden", type=int, default=192, help="size of the model (default: 192)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        places = ("turn", "left", "right")
        turn, *beside = (config_of(options, Path(folder) / place, ScheduleConfig()) for place in places)
        schedule = ScheduleConfig("fully_async", staleness_threshold=options.staleness, partial_rollout=True)
        ahead = config_of(options, Path(folder) / "ahead", schedule)
        run_side_by_side([turn], options.hidden)
        run_side_by_side(beside, options.hidden)
        run_side_by_side([ahead], options.hidden)
        report(turn, beside, ahead)


def parts_of(rows: Sequence[dict[str, Any]]) -> tuple[float, float, float, float]:
    """Return the mean seconds of a step, of its sampling, training and weight sync."""
    names = ("step", "rollout", "train", "export_and_update_weights")
    whole, sampling, training, handing = (fmean(row[f"time/{name}_s"] for row in rows) for name in names)
    return whole, sampling, training, handing


def report(turn: GrpoConfig, beside: Sequence[GrpoConfig], ahead: GrpoConfig) -> None:
    """Print the figures of all runs."""
    slow, fast = rows_of(folder_of(turn)), rows_of(folder_of(ahead))
    whole, *parts = parts_of(slow)
    _, sampling, training, handing = parts_of([row for config in beside for row in rows_of(folder_of(config))])
    after = fmean(row["time/step_s"] for row in fast)
    possible = whole - max(sampling, training) - handing
    for config in (turn, ahead):
        lengths = sorted(answer_lengths(read_episodes(folder_of(config))))
        middle, long, most = (lengths[int(share * (len(lengths) - 1))] for share in (0.5, 0.95, 1))
        print(f"answers      {len(lengths)} of {middle} tokens (median), {long} (95 %), {most} (longest)")
    alone, busy = (
        f"{a:.3f} sampling, {b:.3f} training, {c:.3f} weights" for a, b, c in (parts, (sampling, training, handing))
    )
    print(f"in turn      {whole:.3f} s a step: {alone}")
    print(f"  both busy  {busy}")
    print(f"fully async  {after:.3f} s a step: {whole / after:.2f} times as fast")
    spent = {name: fmean(row.get(f"time/{key}_s", 0.0) for row in fast) for name, key in WAITS.items()}
    print("  of it      " + ", ".join(f"{seconds:.3f} {name}" for name, seconds in spent.items()))
    print(f"overlap      {whole - after:.3f} of {possible:.3f} s that were possible: {(whole - after) / possible:.0%}")
    print(f"staleness    {json.dumps([row['schedule/staleness'] for row in fast])}")
    spans = read_timeline(folder_of(ahead))
    print("idle         " + ", ".join(f"{lane} {share:.0%}" for lane, share in bubble_shares(spans).items()))
    workload = make_workload(turn, slow, answer_lengths(read_episodes(folder_of(turn))))
    for name, config in (("in turn", turn), ("fully async", ahead)):
        print(f"{name:12s} {check_forecast(config, rows_of(folder_of(config)), workload).text}")


def folder_of(config: GrpoConfig) -> Path:
    """Return the directory of a run."""
    assert config.run_dir is not None
    return config.run_dir


if __name__ == "__main__":
    main()
