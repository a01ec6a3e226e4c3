"""Result of a run that evaluates held-out responses, and the table that its terminal and report show."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from schedules.sampling.session import HeldOutMetric


@dataclass(frozen=True)
class Result:
    """What a run came to; `accuracy_before` is that of the first start, however often the run was resumed."""

    accuracy_before: float
    accuracy_after: float
    seconds: float
    run_dir: Path
    steps: int
    metric: HeldOutMetric = "accuracy"
    """What the two are; a score is a mean reward."""


def summary(result: Result) -> list[tuple[str, Any]]:
    """Return the rows of the table: a name and a value each."""
    before, after = result.accuracy_before, result.accuracy_after
    told = (f"{before:.4g}", f"{after:.4g}  ({after - before:+.4g})")
    if result.metric == "accuracy":
        told = (f"{before:.1%}", f"{after:.1%}  ({100 * (after - before):+.1f} points)")
    return [
        (f"held-out {result.metric} before", told[0]),
        (f"held-out {result.metric} after", told[1]),
        ("steps", result.steps),
        ("time", f"{result.seconds:.0f} s"),
        ("open this", str(result.run_dir / "report.html")),
    ]
