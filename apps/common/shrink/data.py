"""Rows for a shrunk run, in the columns that its recipe reads: sums of very different lengths, or pictures."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from apps.quickstart.arithmetic import Problem, addition
from apps.quickstart.shapes import ImageProblem, image_problems, resized

ROWS = 96
SIZES = ((32, 32), (48, 40), (24, 56))
"""Width and height of pictures, in turn, in pixels."""


def write_rows(path: Path, row_of: Callable[[Problem], dict[str, Any]], digits: int, seed: int) -> Path:
    """Write one row a sum; the longest numbers have `digits` digits, most have few."""
    rng = random.Random(seed)
    problems = list(_problems(rng, digits))
    path.write_text("".join(json.dumps(row_of(problem)) + "\n" for problem in problems), encoding="utf-8")
    return path


def write_image_rows(path: Path, row_of: Callable[[ImageProblem, str], dict[str, Any]], seed: int) -> Path:
    """Write one row a picture, made by `row_of` from a `data:` URI; pictures have different sizes."""
    chosen = itertools.islice(image_problems(random.Random(seed)), ROWS)
    rows = (row_of(problem, resized(problem, SIZES[i % len(SIZES)])) for i, problem in enumerate(chosen))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def nested(column: str, value: Any) -> dict[str, Any]:
    """Return {"a": {"b": value}} for the column "a.b"."""
    first, dot, rest = column.partition(".")
    return {first: nested(rest, value) if dot else value}


def _problems(rng: random.Random, digits: int) -> Iterator[Problem]:
    for i in range(ROWS):
        most = digits if i % 16 == 0 else max(1, digits // 8)
        low, high = 10 ** (most - 1), 10**most - 1
        yield addition(rng.randint(low, high), rng.randint(low, high))
