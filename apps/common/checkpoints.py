"""Numbered checkpoints of a run folder: what was saved, in which order, and how to find the last whole one."""

import re
from pathlib import Path

_NAME = re.compile(r"step-(\d+)")


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is kept."""
    return run_dir / "checkpoints" / f"step-{step:06d}"


def last_checkpoint(run_dir: Path) -> tuple[int, Path] | None:
    """The highest numbered checkpoint and its step; None where there is none. Unfinished ones have another name."""
    found = [
        (int(match[1]), path)
        for path in (run_dir / "checkpoints").glob("step-*")
        if path.is_dir() and (match := _NAME.fullmatch(path.name))
    ]
    return max(found, default=None)
