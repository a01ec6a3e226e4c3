"""Where a run writes."""

import os
import time
from pathlib import Path

from apps.common.checkpoints import last_checkpoint
from apps.common.config_file import CONFIG_NAME


def resolve_run_dir(given: Path | None, runs: Path, recipe: str, resume: bool) -> Path:
    """The folder of this run: `given`, else a new one below `runs`, or on resume the newest one there.

    Raises:
        ValueError: there is nothing to resume, or several ranks could each choose a folder of their own.
    """
    if not resume:
        if given is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError("under torchrun every rank must be told the same folder: add --run-dir DIR")
        return given or _new_run_dir(runs, recipe)
    run_dir = given or newest_run(runs)
    if run_dir is None:
        raise ValueError(f"nothing to resume under {runs}; name a run with --run-dir DIR")
    if last_checkpoint(run_dir) is None:
        raise ValueError(f"{run_dir} has no checkpoint to resume from; start anew without --resume")
    return run_dir


def newest_run(runs: Path) -> Path | None:
    """The run folder below `runs` whose configuration was written last."""
    found = [path.parent for path in runs.glob(f"*/{CONFIG_NAME}")]
    return max(found, key=lambda path: (path / CONFIG_NAME).stat().st_mtime, default=None)


def _new_run_dir(runs: Path, recipe: str) -> Path:
    stem = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, n = runs / stem, 1
    while path.exists():
        n += 1
        path = runs / f"{stem}-{n}"
    return path
