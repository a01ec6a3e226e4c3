"""Where a run writes."""

import time
from pathlib import Path


def new_run_dir(runs: Path, recipe: str) -> Path:
    """A folder below `runs` that doesn't exist yet, named after the recipe and the time."""
    stem = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, n = runs / stem, 1
    while path.exists():
        n += 1
        path = runs / f"{stem}-{n}"
    return path
