"""The best checkpoint of a run: its step, and whether a resumed run can still have it."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.storage.directories import existing
from engines.storage.manifest import read_manifest
from schedules.runtime.collectives import broadcast_result, rank_and_world

HELD_OUT, BEFORE, RUN_STEP = "held_out_loss", "held_out_loss_before", "run_step"
"""What a checkpoint says of its step and of the run's beginning, so that both outlive the metrics."""


@dataclass(frozen=True)
class BestCheckpoint:
    """A step whose weights are kept, and their held-out loss."""

    step: int
    loss: float


def best_checkpoint_path(run_dir: Path) -> Path:
    """Return the directory of the weights with the lowest held-out loss."""
    return run_dir / "checkpoints" / "best"


def find_best_checkpoint(run_dir: Path, done: int, losses: Mapping[int, float]) -> BestCheckpoint | None:
    """Return the saved best of the first `done` steps, or None. Collective.

    Weights of a later step are deleted: the run does that step anew, and may come to others. `losses`: what the metrics
    say of each step, for a checkpoint that does not say it.

    Raises:
        ValueError: what is there can't be read; the text says what to do.
    """
    saved = broadcast_result(_read_best(run_dir))
    best = None
    if saved is not None and saved[0] <= done:
        loss = saved[1].get(HELD_OUT, losses.get(saved[0]))
        best = None if loss is None else BestCheckpoint(saved[0], loss)
    if best is None and rank_and_world()[0] == 0:
        _delete(best_checkpoint_path(run_dir))
    return best


def check_best_checkpoint(run_dir: Path, best: BestCheckpoint, step: int) -> None:
    """Raise ValueError where the weights loaded from `best_checkpoint_path`, of `step`, are not the best's.

    Raises:
        ValueError: it is another step's.
    """
    if step != best.step:
        raise ValueError(
            f"{best_checkpoint_path(run_dir)} holds step {step}, and step {best.step} is the best: something else "
            f"wrote there; --resume --run-dir {run_dir} --export last exports the last step"
        )


def _read_best(run_dir: Path) -> tuple[int, dict[str, Any]] | None:
    directory = existing(best_checkpoint_path(run_dir))
    if not directory.is_dir():
        return None
    try:
        facts, _ = read_manifest(directory)
    except ValueError as error:
        raise ValueError(f"{error}; or delete {directory}: the best of the steps from here on is kept then") from error
    extra = dict(facts.get("extra", {}))
    return int(extra.get(RUN_STEP, facts["step"])), extra


def _delete(path: Path) -> None:
    """Delete a directory and what killed writers left; rename it first, so that a kill leaves no half of it."""
    gone = path.with_name(path.name + ".deleted")
    shutil.rmtree(gone, ignore_errors=True)
    while (directory := existing(path)).is_dir():
        os.rename(directory, gone)
        shutil.rmtree(gone)
