"""Train the quickstart's model with its head for multi-token prediction until it predicts, and draft with it.

    python -m apps.grpo.benchmarks.mtp_head FOLDER             on a CPU: the share of tokens that a draft has accepted
    TESSERA_VLLM_PYTHON=PYTHON python -m apps.grpo.benchmarks.mtp_head FOLDER --vllm       on a GPU: the step's gain

The first part is the quickstart's run (warm start, then GRPO; the sampler is the native one, without drafts) with
`mtp_loss_scaling_factor`. Each step's `train/mtp_accuracy` counts, on answers that were sampled for the step and that
nothing has trained on, how many tokens the head finds likeliest two tokens before: what a greedy draft of one more
token has accepted, teacher-forced. It ends with the run's export; a FOLDER that has it (of a CPU, carried to a GPU)
with the same --steps is not trained again. The second part goes on from that export, with vLLM as the sampler,
for a few steps with and without drafts, and prints medians of seconds and accepted tokens.
"""

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from apps.common.cluster import Cluster, RolloutLayout
from apps.grpo.config import GrpoConfig, WarmStart
from apps.grpo.recipes import quickstart
from apps.grpo.run import run
from apps.quickstart.headed_model import save_headed_model
from engines import EngineConfig
from runlog import read_metrics

FACTOR, LAST = 0.3, 10
ACCEPTED = "train/mtp_accuracy"
SHOWN = {"accepted share": ACCEPTED, "cross entropy": "train/mtp_loss", "reward": "reward"}
DRAFTS = (0, 1, 2, 3)
"""Numbers of drafted tokens a step that are compared on a GPU."""
LATER = 2
"""Steps that are left out of the medians: the first ones compile."""


def trained(folder: Path, steps: int, warm_steps: int) -> tuple[GrpoConfig, dict[str, dict[str, float]]]:
    """Run the quickstart with the head, unless it has run; return its configuration and what the head came to."""
    shown = quickstart.RECIPE.config
    config = replace(
        shown,
        model=save_headed_model(folder / "model"),
        run_dir=folder / "run",
        steps=steps,
        warm_start=replace(shown.warm_start, until_accuracy=0.3, eval_every=10, lr=6e-3, steps=warm_steps),
        engine=EngineConfig(device="cpu", lr=8e-4, mtp_loss_scaling_factor=FACTOR),
        eval_every=steps,
        save_every=steps,
    )
    assert config.run_dir is not None
    if not (config.run_dir / "export").is_dir():
        run(config)
    rows = [row for row in read_metrics(config.run_dir) if ACCEPTED in row]
    warm = [row for row in read_metrics(config.run_dir / "warm-start") if ACCEPTED in row]
    last, before = rows[-LAST:], len(warm)
    means = {name: statistics.fmean(row[key] for row in last) for name, key in SHOWN.items()}
    return config, {
        "warm start, first step": {"steps before": 0, "accepted share": _rounded(warm[0])},
        "GRPO, first step": {"steps before": before, "accepted share": _rounded(rows[0])},
        f"GRPO, last {LAST} steps": {"steps before": before + steps - LAST}
        | {name: round(mean, 3) for name, mean in means.items()},
    }


def _rounded(row: dict[str, Any]) -> float:
    return round(float(row[ACCEPTED]), 3)


def drafted(folder: Path, config: GrpoConfig, drafts: int, steps: int) -> dict[str, float]:
    """Train on from the export on a GPU, sampled by vLLM with so many drafted tokens a step; return medians."""
    settings = {"method": "mtp", "num_speculative_tokens": drafts}
    words = (f"speculative_config={json.dumps(settings)}",) if drafts else ()
    assert config.run_dir is not None
    later = replace(
        config,
        model=config.run_dir / "export",
        run_dir=folder / f"drafts-{drafts}",
        steps=steps,
        warm_start=WarmStart(steps=0),
        engine=EngineConfig(device="cuda", lr=1e-5, mtp_loss_scaling_factor=FACTOR),
        cluster=Cluster(rollout=RolloutLayout(engine="vllm", vllm=words)),
        eval_every=1000,
        save_every=1000,
    )
    run(later)
    assert later.run_dir is not None
    rows = [row for row in read_metrics(later.run_dir) if "time/step_s" in row][LATER:]
    names = ("time/step_s", "time/rollout_s", "time/train_s", "rollout/accepted_tokens", "mismatch/kl", "reward")
    return {name: statistics.median(row[name] for row in rows) for name in names if name in rows[0]}


def main() -> None:
    """Print what was measured, as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=40, help="of GRPO, and of each run with vLLM a quarter")
    parser.add_argument("--warm-steps", type=int, default=quickstart.RECIPE.config.warm_start.steps)
    parser.add_argument("--vllm", action="store_true", help="measure drafts on a GPU too")
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    config, found = trained(folder, arguments.steps, arguments.warm_steps)
    if arguments.vllm:
        steps = max(LATER + 3, arguments.steps // 4)
        found |= {f"{n} drafts a step": drafted(folder, config, n, steps) for n in DRAFTS}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
