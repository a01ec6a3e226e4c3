"""Fully asynchronous against in turn, on answers with a long tail: the ratio, and the share of the overlap there was.

python -m apps.grpo.benchmarks.overlap --steps 16

Both runs are whole runs of the app, on the same tasks with the same model: one process in turn, then a sampling process
beside the trainer. An episode has as many turns as its number says, most of them few, one in twelve many; weights
hardly move, so that both runs sample alike: how many turns there were is printed. What was possible is counted in the
run in turn: if its sampling and its training had been side by side, it would have taken the longer of the two, and one
step's first sampling before. Where long answers of several steps overlap, more than that is gained. Run it on a machine
with two free cores: both are busy.
"""

import argparse
import json
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from apps.common.plan.cluster import Schedule
from apps.grpo.config import GrpoConfig
from apps.grpo.forecast import answer_lengths, compared, workload_of
from apps.grpo.main import run
from apps.grpo.recipe import Recipe
from apps.grpo.testing import RECIPE, Babble, BabbleTasks
from rollout import EnvironmentFactory, Outcome, Reply, TaskRow
from runlog import read_episodes, read_metrics
from runlog.timeline import bubble_shares, read_timeline

LONG, SHORT, ONE_IN, TOKENS = 24, 3, 12, 64
STOPS = tuple(range(0, 277, 6))
"""An untrained model says all tokens as often: a sixth of them end its turn, so that hardly any is cut off."""


class Tailed(Babble):
    """Talk for a number of turns that the number says."""

    turns = 0

    async def step(self, reply: Reply) -> Outcome:
        """Ask for more until the turns are over."""
        outcome = await super().step(reply)
        self.turns += 1
        return replace(outcome, done=self.turns == (LONG if self.number % ONE_IN == 0 else SHORT))


@dataclass(frozen=True)
class Tail:
    """Makes a `Tailed`; picklable."""

    number: int

    def __call__(self) -> Tailed:
        """One episode."""
        return Tailed(self.number)


@dataclass(frozen=True)
class TailedTasks(BabbleTasks):
    """The numbers of `BabbleTasks`, talked about with a long tail."""

    def environment(self, row: TaskRow) -> EnvironmentFactory:
        """To talk about the row's number."""
        return Tail(row.data["number"])


def make_tasks(config: GrpoConfig, tokenizer: object) -> TailedTasks:
    """As many held-out numbers as asked for."""
    del tokenizer
    return TailedTasks(config.data.eval_prompts)


def rows_of(run_dir: Path) -> list[dict]:
    """The rows of its steps but the first, which warms everything up."""
    return [row for row in read_metrics(run_dir) if row["step"] > 1]


def main() -> None:
    """Run both, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--staleness", type=float, default=1.0)
    parser.add_argument("--group-size", type=int, default=4)
    options = parser.parse_args()
    recipe = replace(RECIPE, make_tasks=make_tasks)
    assert isinstance(recipe, Recipe)
    ahead = Schedule("fully_async", staleness_threshold=options.staleness, partial_rollout=True)
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for name, schedule in (("in turn", Schedule()), ("fully async", ahead)):
            config = replace(
                RECIPE.config,
                run_dir=Path(folder) / name.replace(" ", "-"),
                steps=options.steps,
                prompts=options.prompts,
                group_size=options.group_size,
                max_turns=LONG,
                sampling=replace(RECIPE.config.sampling, max_new_tokens=TOKENS, stop_token_ids=STOPS),
                engine=replace(RECIPE.config.engine, lr=1e-6),
                max_episode_tokens=1024,
                eval_every=options.steps,
                save_every=options.steps,
                keep_groups=options.prompts,
                data=replace(RECIPE.config.data, eval_prompts=2),
                cluster=replace(RECIPE.config.cluster, schedule=schedule),
            )
            run(config, recipe)
            found[name] = config
        report(found["in turn"], found["fully async"])


def report(turn: GrpoConfig, ahead: GrpoConfig) -> None:
    """The figures of both runs."""
    assert turn.run_dir is not None
    assert ahead.run_dir is not None
    slow, fast = rows_of(turn.run_dir), rows_of(ahead.run_dir)
    before, after = (fmean(row["time/step_s"] for row in rows) for rows in (slow, fast))
    sampling, training = (fmean(row[f"time/{part}_s"] for row in slow) for part in ("rollout", "train"))
    handing = fmean(row["time/export_and_update_weights_s"] for row in slow)
    possible = before - max(sampling, training) - handing
    for config in (turn, ahead):
        played = [row["metadata"] for row in read_episodes(Path(str(config.run_dir))) if row["split"] != "held-out"]
        turns = Counter(found["turns"] for found in played)
        cut = sum(found["end"] != "done" for found in played)
        print(f"turns        {turns[SHORT]} episodes of {SHORT}, {turns[LONG]} of {LONG}, {cut} cut off")
    print(
        f"in turn      {before:.3f} s a step: {sampling:.3f} sampling, {training:.3f} training, {handing:.3f} weights"
    )
    print(f"fully async  {after:.3f} s a step: {before / after:.2f} times as fast")
    print(
        f"overlap      {before - after:.3f} of {possible:.3f} s that were possible: {(before - after) / possible:.0%}"
    )
    print(f"staleness    {json.dumps([row['schedule/staleness'] for row in fast])}")
    spans = read_timeline(ahead.run_dir)
    print("idle         " + ", ".join(f"{lane} {share:.0%}" for lane, share in bubble_shares(spans).items()))
    workload = workload_of(turn, slow, answer_lengths(read_episodes(turn.run_dir)))
    for name, config in (("in turn", turn), ("fully async", ahead)):
        print(f"{name:12s} {compared(config, rows_of(config.run_dir), workload).text}")


if __name__ == "__main__":
    main()
