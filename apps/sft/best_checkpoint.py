"""The best weights of a run: which step they are of, and whether a run that goes on can still have them."""

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apps.common.run.ranks import from_rank_0, rank_and_world
from engines.storage.directories import existing
from engines.storage.manifest import read_manifest

HELD_OUT, BEFORE = "held_out_loss", "held_out_loss_before"
"""What a checkpoint says of its step and of the run's beginning, so that both outlive the metrics."""


@dataclass(frozen=True)
class Best:
    """A step whose weights are kept, and their held-out loss."""

    step: int
    loss: float


def best_path(run_dir: Path) -> Path:
    """Return where the weights with the lowest held-out loss are kept."""
    return run_dir / "checkpoints" / "best"


def best_of_before(run_dir: Path, done: int, losses: Mapping[int, float]) -> Best | None:
    """Return the best that is kept of the first `done` steps; None where none is. Collective.

    Weights of a later step are deleted: the run does that step anew, and may come to others. `losses`: what the metrics
    say of each step, for a checkpoint that does not say it.

    Raises:
        ValueError: what is there can't be read; the text says what to do.
    """
    kept = from_rank_0(_kept(run_dir))
    found = None
    if kept is not None and kept[0] <= done:
        loss = kept[1].get(HELD_OUT, losses.get(kept[0]))
        found = None if loss is None else Best(kept[0], loss)
    if found is None and rank_and_world()[0] == 0:
        _delete(best_path(run_dir))
    return found


def check_best(run_dir: Path, best: Best, step: int) -> None:
    """Refuse to export what was loaded from `best_path`, of `step`, as another step's.

    Raises:
        ValueError: it is another step's.
    """
    if step != best.step:
        raise ValueError(
            f"{best_path(run_dir)} holds step {step}, and step {best.step} is the best: something else wrote there; "
            f"--resume --run-dir {run_dir} --export last exports the last step"
        )


def _kept(run_dir: Path) -> tuple[int, dict[str, Any]] | None:
    found = existing(best_path(run_dir))
    if not found.is_dir():
        return None
    try:
        facts, _ = read_manifest(found)
    except ValueError as error:
        raise ValueError(f"{error}; or delete {found}: the best of the steps from here on is kept then") from error
    return int(facts["step"]), dict(facts.get("extra", {}))


def _delete(path: Path) -> None:
    """Delete it, and what killed writers left: renamed first, so that a kill leaves no half under its name."""
    gone = path.with_name(path.name + ".deleted")
    shutil.rmtree(gone, ignore_errors=True)
    while (found := existing(path)).is_dir():
        os.rename(found, gone)
        shutil.rmtree(gone)
