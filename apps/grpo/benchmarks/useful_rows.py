"""Useful rows (of groups whose rewards differ) for the tokens that are sampled: as they come, refilled, and with pools.

`python -m apps.grpo.benchmarks.useful_rows FOLDER [--schedule fully_async]`: whole runs of the quickstart's untrained
model, three passes over a file of which every third prompt is always right and every third always wrong; the reward of
the others is a coin's.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args
from zlib import crc32

from apps.common.cluster import Cluster
from apps.grpo.config import DataConfig, PluginConfig
from apps.grpo.recipes import math, quickstart
from apps.grpo.run import run
from apps.quickstart.model import save_tiny_model
from engines import EngineConfig
from rollout import Reply
from runlog import read_metrics
from schedules.config import FilterGroups, Mode, ScheduleConfig
from schedules.sampling.refill import DROPPED_TOKENS

PROMPTS, PASSES, EACH, GROUP = 144, 3, 16, 8
CASES = {
    "groups as they come": FilterGroups(),
    "filter_groups": FilterGroups(True),
    "filter_groups, pools of a tenth": FilterGroups(True, easy_fraction=0.1, hard_fraction=0.1),
}


def reward(reply: Reply, row: Mapping[str, Any], end: str) -> float:
    """Return the reward of a reply by the kind of its prompt."""
    del end  # named: a reply that a limit cut off is scored too
    return (0.0, 1.0, float(crc32(reply.text.encode()) % 2))[row["kind"]]


def measured(folder: Path, filter_groups: FilterGroups, mode: Mode) -> dict[str, float]:
    """Return what a run came to that trains on about as many groups as the file has with signal in three passes."""
    filled = filter_groups.enable
    config = replace(
        math.RECIPE.config,
        model=folder / "model",
        data=DataConfig(data=folder / "rows.jsonl", eval_prompts=4, max_prompt_tokens=32),
        plugins=PluginConfig(reward=f"{__name__}:reward"),
        run_dir=folder / f"run-{len(list(folder.glob('run-*')))}",
        steps=PASSES * PROMPTS // EACH // (3 if filled else 1),
        prompts_per_step=EACH,
        group_size=GROUP,
        max_episode_tokens=64,
        eval_every=1000,
        save_every=1000,
        engine=EngineConfig(device="cpu", lr=1e-9),
        sampling=quickstart.RECIPE.config.sampling,
        filter_groups=filter_groups,
        cluster=Cluster(schedule=ScheduleConfig(mode=mode)),
    )
    run(config)
    assert config.run_dir is not None
    steps = [row for row in read_metrics(config.run_dir) if row["step"]]
    useful = sum(row["reward/mixed_groups"] * EACH * GROUP for row in steps)
    tokens = sum(row["rollout/sampled_tokens"] + row.get(DROPPED_TOKENS, 0) for row in steps)
    return {
        "steps": len(steps),
        "useful rows of a step's 128": round(useful / len(steps), 1),
        "tokens sampled a step": round(tokens / len(steps)),
        "useful rows a 1000 sampled tokens": round(1000 * useful / tokens, 1),
    }


def main() -> None:
    """Print the values of all cases as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--schedule", default="sync", choices=get_args(Mode))
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    save_tiny_model(folder / "model", 0)
    rows = ({"question": f"{n}+1=", "answer": str(n + 1), "kind": n % 3} for n in range(PROMPTS))
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    print(json.dumps({name: measured(folder, case, arguments.schedule) for name, case in CASES.items()}, indent=1))


if __name__ == "__main__":
    main()
