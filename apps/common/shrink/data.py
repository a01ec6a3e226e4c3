"""Rows for a shrunk run, in the columns that its recipe reads: sums of numbers of very different lengths."""

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from apps.quickstart.arithmetic import Problem, addition

ROWS = 96


def write_rows(path: Path, row_of: Callable[[Problem], dict[str, Any]], digits: int, seed: int) -> Path:
    """Write a row a sum; the longest numbers have `digits` digits, most have few."""
    rng = random.Random(seed)
    problems = list(_problems(rng, digits))
    path.write_text("".join(json.dumps(row_of(problem)) + "\n" for problem in problems), encoding="utf-8")
    return path


def nested(column: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} for the column "a.b"."""
    first, dot, rest = column.partition(".")
    return {first: nested(rest, value) if dot else value}


def _problems(rng: random.Random, digits: int) -> Iterator[Problem]:
    for i in range(ROWS):
        most = digits if i % 16 == 0 else max(1, digits // 8)
        low, high = 10 ** (most - 1), 10**most - 1
        yield addition(rng.randint(low, high), rng.randint(low, high))
