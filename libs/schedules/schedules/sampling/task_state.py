"""Where a run's tasks were at its last checkpoints: one small file, written before each checkpoint.

Each record holds the run's number too, by which the ledgers of another run are told from its own.
"""

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "tasks.json"
_RUN = "run number"
_RUN_BITS = 47
"""Bits of a run's number: a ledger takes those below 2**48."""


def save_cursor(run_dir: Path, step: int, cursor: Mapping[str, Any], keep: int) -> None:
    """Record the tasks' cursor after a step, whole or not at all; the last `keep` + 2 records are kept.

    That is one more than there are checkpoints: this step's may never become whole, and then the one before it counts.
    """
    records = _read(run_dir)
    mark = {key: record[key] for record in records.values() for key in (_RUN,) if key in record}
    _write(run_dir, records | {str(step): {**cursor, **mark}}, keep + 2)


def load_cursor(run_dir: Path, step: int) -> dict[str, Any]:
    """Return the cursor recorded after a step.

    Raises:
        ValueError: there is none.
    """
    records = _read(run_dir)
    if str(step) not in records:
        raise ValueError(f"{run_dir / NAME} has no record of where its tasks were after step {step}: begin a new run")
    return {key: value for key, value in records[str(step)].items() if key != _RUN}


def run_number(run_dir: Path) -> int | None:
    """Return the run's number, which a run that has neither records nor ledgers draws; None where it has no number."""
    records = _read(run_dir)
    known = [record[_RUN] for record in records.values() if _RUN in record]
    if known or records or any(run_dir.glob("ledger*.bin")):
        return int(known[0]) if known else None
    run_dir.mkdir(parents=True, exist_ok=True)
    number = secrets.randbits(_RUN_BITS)
    _write(run_dir, {"0": {_RUN: number}}, 1)
    return number


def _write(run_dir: Path, records: Mapping[str, Any], most: int) -> None:
    kept = sorted(records, key=int)[-most:]
    part = run_dir / f"{NAME}.part"
    with part.open("w", encoding="utf-8") as file:
        json.dump({name: records[name] for name in kept}, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(run_dir / NAME)


def _read(run_dir: Path) -> dict[str, Any]:
    path = run_dir / NAME
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
