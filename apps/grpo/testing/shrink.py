"""Recipes for NPUs, shrunk, each in a process of its own as from the command line: for tests."""

import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apps.common.shrink.npu import MESSAGE
from apps.common.testing.weight_delta import assert_trained
from apps.grpo.main import main
from apps.grpo.registry import recipes

ONE_RANK = (
    *("--nproc-per-node", "1", "--parallel.tensor", "1", "--parallel.pipeline", "1"),
    *("--parallel.first-stage-layers", "None", "--parallel.last-stage-layers", "None"),
    *("--parallel.expert", "1", "--parallel.expert-tensor", "1"),
)
"""A fully asynchronous run: one rank beside a process that samples."""
LARGEST_GAP = {"float32": 1e-3, "bfloat16": 0.25}
"""Between the sampler's log-probs and the trainer's."""


def run_whole(argv: Sequence[str], folder: Path, capfd: Any) -> tuple[str, list[dict[str, Any]]]:
    """Run a command; return its output, and the metrics of its two steps. `capfd` is pytest's.

    Raises:
        AssertionError: with what it said, where it failed.
    """
    process = multiprocessing.get_context("spawn").Process(target=main, args=([*argv, "--max-steps", "2"],))
    process.start()
    process.join()
    output = capfd.readouterr()
    assert process.exitcode == 0, output.err[-4000:]
    return output.out, [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()][1:]


def check(name: str, dtype: str, output: str, rows: Sequence[dict[str, Any]], run_dir: Path) -> None:
    """Assert that the run used device npu, by the recipe's own setting, and trained every tensor.

    Raises:
        AssertionError: it did not.
    """
    assert MESSAGE in output
    assert "--trainer.device" not in output, "the device is the recipe's own"
    assert f"{dtype} on npu:0" in output
    assert len(rows) == 2
    assert all(0 < row["memory/allocated_gib"] < row["memory/peak_gib"] for row in rows), "the CPU counts none"
    assert all(row["log_prob_difference_max"] < LARGEST_GAP[dtype] for row in rows)
    assert_trained(run_dir)
    saved = json.loads((run_dir / "config.json").read_text())
    assert saved["engine"]["device"] == recipes()[name].config.engine.device == "npu"
