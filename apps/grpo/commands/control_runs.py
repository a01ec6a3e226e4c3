"""Does the reward truly rise? Several seeds of a recipe and control runs that must not learn, in one table.

bazel run //apps/grpo:commands/control_runs -- --recipe quickstart --seeds 0 1 2
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import tyro

from apps.common.cli.command_line import main as run_command
from apps.common.cli.command_line import user_directory
from apps.common.run.run_dir import resolve_run_dir
from apps.grpo.config import GrpoConfig
from apps.grpo.main import run
from apps.grpo.registry import recipes
from engines import EngineConfig
from runlog import summary_table


@dataclass(frozen=True)
class ControlRunsConfig:
    """Run a quickstart recipe for several seeds, and its control runs from the first seed's warm start."""

    recipe: str = "quickstart"
    """quickstart, quickstart-tool or quickstart-code."""
    seeds: tuple[int, ...] = (0, 1, 2)
    controls: bool = True
    """Also run shuffled advantages, and learning rate 0."""
    run_dir: Path | None = None
    """Where the runs are written; runs/study/RECIPE-TIME by default."""


def run_controls(config: ControlRunsConfig) -> dict[str, dict[str, float]]:
    """Run all seeds and controls; return for each run the accuracy before and after, in percent, and seconds."""
    user_directory()
    if config.recipe not in ("quickstart", "quickstart-tool", "quickstart-code"):
        raise ValueError(f"--recipe must be quickstart, quickstart-tool or quickstart-code, got {config.recipe!r}")
    run_dir = resolve_run_dir(config.run_dir, Path("runs/study"), config.recipe, resume=False)
    base = recipes()[config.recipe].config
    results: dict[str, dict[str, float]] = {}
    for name, settings in _runs(base, config, run_dir).items():
        result = run(settings)
        results[name] = {
            "before": 100 * result.accuracy_before,
            "after": 100 * result.accuracy_after,
            "rise": 100 * (result.accuracy_after - result.accuracy_before),
            "seconds": result.seconds,
        }
        (run_dir / "study.json").write_text(json.dumps(results, indent=2) + "\n")
    rows = [
        (name, f"{r['before']:.1f} % to {r['after']:.1f} % ({r['rise']:+.1f} points) in {r['seconds']:.0f} s")
        for name, r in results.items()
    ]
    summary_table(rows, f"Held-out accuracy, {config.recipe}")
    return results


def _runs(base: GrpoConfig, config: ControlRunsConfig, run_dir: Path) -> dict[str, GrpoConfig]:
    runs = {f"seed {seed}": replace(base, seed=seed, run_dir=run_dir / f"seed-{seed}") for seed in config.seeds}
    if config.controls:
        seed = config.seeds[0]
        model = run_dir / f"seed-{seed}" / "warm-start" / "export"
        begun = replace(base, seed=seed, model=model, warm_start=replace(base.warm_start, steps=0))
        warm = replace(begun, allow_idle_steps=None)  # one that unlearns all has nothing left to train on
        runs["shuffled advantages"] = replace(warm, control_run="shuffled-advantages", run_dir=run_dir / "shuffled")
        lr_0: EngineConfig = replace(base.engine, lr=0.0)
        runs["learning rate 0"] = replace(warm, engine=lr_0, run_dir=run_dir / "lr-0")
    return runs


def main(argv: Sequence[str]) -> None:
    """Run the command line."""
    config = tyro.cli(ControlRunsConfig, args=list(argv), prog="control_runs")
    run_command(lambda: run_controls(config))


if __name__ == "__main__":
    main(sys.argv[1:])
