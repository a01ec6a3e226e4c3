"""The directory of a run: where a new one writes, and where a stopped one resumes."""

import os
import time
from pathlib import Path

from apps.common.run.checkpoints import last_checkpoint
from apps.common.run.config_file import CONFIG_NAME


def check_run_dir(requested: Path | None, runs: Path, resume: bool) -> Path | None:
    """Return the folder to resume or `requested`; None for a new one.

    Raises:
        ValueError: there is nothing to resume, a new run would write over another one, or several ranks could each
            choose a folder of their own.
    """
    if resume:
        run_dir = requested or newest_run(runs)
        if run_dir is None:
            raise ValueError(f"nothing to resume under {runs}; name a run with --run-dir DIR")
        if not (run_dir / CONFIG_NAME).is_file():
            raise ValueError(f"nothing to resume in {run_dir}: it has no {CONFIG_NAME}; start anew without --resume")
        return run_dir
    if requested is None and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("under torchrun every rank must be told the same folder: add --run-dir DIR")
    if requested is not None and (requested / CONFIG_NAME).exists():
        raise ValueError(
            f"{requested} holds a run already: go on with --resume --run-dir {requested}, or name another folder"
        )
    return requested


def resolve_run_dir(requested: Path | None, runs: Path, recipe: str, resume: bool) -> Path:
    """Return the folder of this run: `requested`, else a new one in `runs`, or on resume the newest one there.

    Raises:
        ValueError: see `check_run_dir`; or the folder can't be made.
    """
    run_dir = check_run_dir(requested, runs, resume) or new_run_dir(runs, recipe)
    if resume:
        return run_dir
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--run-dir {run_dir} can't be made: {error.strerror}") from error
    return run_dir


def steps_done(run_dir: Path, steps: int) -> tuple[int, Path | None]:
    """Return how many steps the run's last checkpoint holds, and its path; (0, None) where there is none.

    Raises:
        ValueError: it holds more than `steps`, so that nothing is left to do.
    """
    done, checkpoint = last_checkpoint(run_dir) or (0, None)
    if done > steps:
        raise ValueError(f"{run_dir} has done {done} steps already: --max-steps {steps} is less; give at least {done}")
    return done, checkpoint


def resume_hint(run_dir: Path) -> str:
    """Return how a user can resume a stopped run, or start it again."""
    if not (run_dir / CONFIG_NAME).is_file():
        return "stopped before anything was trained; start again"
    last = last_checkpoint(run_dir)
    where = f"from step {last[0]}" if last is not None else "from the start, as it has no checkpoint yet"
    return f"stopped; --resume --run-dir {run_dir} goes on {where}"


def newest_run(runs: Path) -> Path | None:
    """Return the run folder in `runs` with the newest configuration file."""
    runs_with_config = [path.parent for path in runs.glob(f"*/{CONFIG_NAME}")]
    return max(runs_with_config, key=lambda path: (path / CONFIG_NAME).stat().st_mtime, default=None)


def new_run_dir(runs: Path, recipe: str) -> Path:
    """Return a folder under `runs` that is not there yet, by the recipe and the time."""
    name = Path(recipe.rpartition(":")[0]).name.removesuffix(".py") or recipe  # of FILE.py:NAME the file's
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, n = runs / stem, 1
    while path.exists():
        n += 1
        path = runs / f"{stem}-{n}"
    return path
