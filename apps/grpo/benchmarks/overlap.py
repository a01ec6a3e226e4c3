"""Fully asynchronous against in turn, on answers with a long tail: the ratio, and the share of the overlap there was.

python -m apps.grpo.benchmarks.overlap

Both runs are whole runs of the app, on the same tasks with the same model: one process in turn, then a sampling process
beside the trainer. An untrained model ends its answer at each token with the same chance, so that a few answers of a
step are many times as long as most; weights hardly move, so that both runs sample alike: how long answers were is
printed. What was possible: had sampling and training been side by side, a step would have taken the longer of the two.
Cores share their memory and its caches, so how long each takes then is measured with both cores busy, by two runs in
turn at once. Where long answers of several steps overlap, more than that is gained. Run it on a machine with two free
cores.
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

from apps.common.cluster import Schedule
from apps.grpo.commands.split_forecast import answer_lengths, compared, workload_of
from apps.grpo.config import GrpoConfig
from apps.grpo.main import run
from apps.grpo.recipe import Recipe
from apps.grpo.testing.recipe import RECIPE
from apps.quickstart.model import ensure_tiny_model, tiny_config
from runlog import read_episodes, read_metrics
from runlog.timeline import bubble_shares, read_timeline

TOKENS = 448
"""Of an answer, at most."""
STOPS = tuple(range(0, 277, 56))
"""An untrained model says all tokens as often: one in 55 ends its answer, and hardly any is cut off."""

WAITS = {
    "waiting for answers": "wait_for_rollout",
    "for probes": "wait_for_probes",
    "training": "train",
    "waiting for a sync": "wait_for_sync",
    "weights": "export_and_update_weights",
}


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    """Return the rows of its steps but the first, which warms everything up."""
    return [row for row in read_metrics(run_dir) if row["step"] > 1]


def recipe_of(hidden: int) -> Recipe:
    """Return tasks that need no reward of sense, and a model of this size."""
    shape = partial(tiny_config, hidden=hidden)
    return replace(RECIPE, make_model=partial(ensure_tiny_model, make_config=shape))


def config_of(options: argparse.Namespace, run_dir: Path, schedule: Schedule) -> GrpoConfig:
    """Return a run without evaluations in between."""
    return replace(
        RECIPE.config,
        run_dir=run_dir,
        steps=options.steps,
        prompts=options.prompts,
        group_size=options.group_size,
        epochs=options.epochs,
        max_turns=1,
        sampling=replace(RECIPE.config.sampling, max_new_tokens=TOKENS, stop_token_ids=STOPS),
        engine=replace(RECIPE.config.engine, lr=1e-6),
        max_episode_tokens=512,
        eval_every=options.steps,
        save_every=options.steps,
        keep_groups=options.prompts,
        data=replace(RECIPE.config.data, eval_prompts=2),
        cluster=replace(RECIPE.config.cluster, schedule=schedule),
    )


def run_quietly(config: GrpoConfig, hidden: int) -> None:
    """In a process of its own."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        run(config, recipe_of(hidden))


def run_side_by_side(configs: Sequence[GrpoConfig], hidden: int) -> None:
    """Each in a process of its own, at once; RuntimeError if one fails."""
    context = multiprocessing.get_context("spawn")
    children = [context.Process(target=run_quietly, args=(config, hidden)) for config in configs]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise RuntimeError("a run beside another failed: see above")


def main() -> None:
    """Run all, and print."""
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
        turn, *beside = (config_of(options, Path(folder) / place, Schedule()) for place in places)
        schedule = Schedule("fully_async", staleness_threshold=options.staleness, partial_rollout=True)
        ahead = config_of(options, Path(folder) / "ahead", schedule)
        run_side_by_side([turn], options.hidden)
        run_side_by_side(beside, options.hidden)
        run_side_by_side([ahead], options.hidden)
        report(turn, beside, ahead)


def parts_of(rows: Sequence[dict[str, Any]]) -> tuple[float, float, float, float]:
    """Return seconds of a step, of its sampling, training and handing over, on average."""
    names = ("step", "rollout", "train", "export_and_update_weights")
    whole, sampling, training, handing = (fmean(row[f"time/{name}_s"] for row in rows) for name in names)
    return whole, sampling, training, handing


def report(turn: GrpoConfig, beside: Sequence[GrpoConfig], ahead: GrpoConfig) -> None:
    """The figures of all runs."""
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
    workload = workload_of(turn, slow, answer_lengths(read_episodes(folder_of(turn))))
    for name, config in (("in turn", turn), ("fully async", ahead)):
        print(f"{name:12s} {compared(config, rows_of(folder_of(config)), workload).text}")


def folder_of(config: GrpoConfig) -> Path:
    """Return where a run wrote."""
    assert config.run_dir is not None
    return config.run_dir


if __name__ == "__main__":
    main()
