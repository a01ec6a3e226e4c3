"""The files of a run: one JSON object a line, appended, safe to read while the run goes on and after a kill."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
EPISODES = "episodes.jsonl"
CONFIG = "config.json"
DEFAULTS = "defaults.json"


def plain(value: Any) -> Any:
    """Return the value as JSON can hold it: numbers of any library as int or float, NaN and infinities as None, tensors
    and arrays as lists, paths as text. TypeError names a type that it cannot hold."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # torch and numpy, without importing either
        return plain(value.tolist())
    raise TypeError(f"cannot log a {type(value).__name__}; give numbers, text, lists or mappings")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a jsonl file, none if it is absent; a truncated last line is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", newline="\n") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):
                return
            yield parse_line(path, number, line)


def parse_line(path: Path, number: int, line: str) -> dict[str, Any]:
    """Return the object of one line; ValueError, which names file and line, for anything else."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not valid JSON ({error}); remove the line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{path}, line {number}: expected an object; remove the line")
    return row


def cut_after(path: Path, step: int) -> int:
    """Drop the rows later than `step`, and a truncated last line; return the number of rows that stay. A resumed run
    repeats the steps after its checkpoint, and the file must hold each step once."""
    rows = [row for row in read_lines(path) if int(row.get("step", 0)) <= step]
    if path.exists():
        partial = path.with_suffix(".tmp")
        with partial.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(encode(row) for row in rows)
        partial.replace(path)
    return len(rows)


def encode(row: Mapping[str, Any]) -> str:
    """Return one line of a jsonl file."""
    return json.dumps(plain(row), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def read_metrics(run_dir: Path | str) -> list[dict[str, Any]]:
    """Return all rows of a run's metrics, in order; each has a `step`."""
    return list(read_lines(Path(run_dir) / METRICS))


def read_episodes(run_dir: Path | str) -> list[dict[str, Any]]:
    """Return all sampled episodes of a run, in order."""
    return list(read_lines(Path(run_dir) / EPISODES))
