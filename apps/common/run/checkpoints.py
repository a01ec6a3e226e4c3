"""Numbered checkpoints of a run folder: what was saved, in which order, the last whole one, and which ones are kept."""

import re
import shutil
from pathlib import Path

CHECKPOINTS = "checkpoints"
_NAME = re.compile(r"step-(\d+)")
_DELETED = ".deleted"


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Return the directory of the checkpoint after `step` steps."""
    return run_dir / CHECKPOINTS / f"step-{step:06d}"


def last_checkpoint(run_dir: Path) -> tuple[int, Path] | None:
    """Return the highest numbered checkpoint and its step, or None; unfinished ones have other names."""
    return max(whole_checkpoints(run_dir), default=None)


def delete_old_checkpoints(run_dir: Path, keep: int) -> list[Path]:
    """Delete all checkpoints but the last one and the `keep` before it; return the deleted paths.

    Each is renamed before its files go, so that a kill leaves no half of a checkpoint under a checkpoint's name; what
    an earlier kill left behind goes too.
    """
    old = [path for _, path in sorted(whole_checkpoints(run_dir))][: -(keep + 1)]
    for path in old:
        path.rename(path.with_name(path.name + _DELETED))
    for path in (run_dir / CHECKPOINTS).glob(f"step-*{_DELETED}"):
        shutil.rmtree(path)
    return old


def whole_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """Return the number of steps and the path of each checkpoint that is whole, in no order."""
    return [
        (int(match[1]), path)
        for path in (run_dir / CHECKPOINTS).glob("step-*")
        if path.is_dir() and (match := _NAME.fullmatch(path.name))
    ]
