"""Where a run's tasks were at its last checkpoints: one small file, written before each checkpoint."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "tasks.json"


def save_cursor(run_dir: Path, step: int, cursor: Mapping[str, Any], keep: int) -> None:
    """Record the tasks' cursor after a step, whole or not at all; the last `keep` + 2 records are kept.

    That is one more than there are checkpoints: this step's may never become whole, and then the one before it counts.
    """
    records = _read(run_dir) | {str(step): dict(cursor)}
    kept = sorted(records, key=int)[-(keep + 2) :]
    part = run_dir / f"{NAME}.part"
    with part.open("w", encoding="utf-8") as file:
        json.dump({name: records[name] for name in kept}, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(run_dir / NAME)


def load_cursor(run_dir: Path, step: int) -> dict[str, Any]:
    """Return the cursor recorded after a step.

    Raises:
        ValueError: there is none.
    """
    records = _read(run_dir)
    if str(step) not in records:
        raise ValueError(f"{run_dir / NAME} has no record of where its tasks were after step {step}: begin a new run")
    return dict(records[str(step)])


def _read(run_dir: Path) -> dict[str, Any]:
    path = run_dir / NAME
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
