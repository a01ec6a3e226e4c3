"""What a run's metrics say that nobody should miss: steps that trained nothing, responses that are all cut off, ...

`row_notices` is for the terminal, where each kind is told when it first occurs. `run_notices` counts over all rows, for
the head of the report and the end of a run. Both read the names of metrics alone.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from runlog.display import shown

Row = Mapping[str, Any]
IDLE = "idle"
"""Key of a row, a text: why the step trained nothing."""
MOST_REASONS = 3
NOT_CALLED = "; the reward function was never called"


def row_notices(row: Row) -> dict[str, str]:
    """Return lines on one row by their kind; none where all is well."""
    step, lines = row.get("step", 0), {}
    uncalled = NOT_CALLED if row.get("reward/called") == 0 else ""
    if IDLE in row:
        lines["idle"] = f"step {step} trained nothing: {row[IDLE]}"
    elif row.get("response/truncated") == 1:
        lines["truncated"] = f"step {step}: every response was cut off by a limit{uncalled}"
    if row.get("eval/truncated") == 1:
        lines["held-out truncated"] = f"step {step}: every held-out response was cut off by a limit"
    if not 0 <= (accuracy := row.get("eval/accuracy") or 0) <= 1:
        lines["accuracy"] = (
            f"step {step}: eval/accuracy is {shown(accuracy)}, the mean of rewards outside [0, 1]: declare "
            'held_out_metric = "score" on the reward, or on the environment'
        )
    if row.get("warm_start/accuracy", 1) < row.get("warm_start/wanted", 0):
        lines["warm start"] = (
            f"the warm start ended after {row['warm_start/steps']:g} steps at {row['warm_start/accuracy']:.1%}, below "
            f"the {row['warm_start/wanted']:.1%} that it was to reach"
        )
    return lines


def run_notices(rows: Sequence[Row]) -> list[str]:
    """Return one line for each kind that occurs in a run, with its counts; none where all is well."""
    steps = [row for row in rows if row.get("step", 0) > 0]
    lines = [*_idle(steps), *_truncated(steps), *_constant(steps)]
    evaluations = [row for row in rows if "eval/truncated" in row]
    if cut := [row for row in evaluations if row["eval/truncated"] == 1]:
        lines.append(
            f"every held-out response was cut off by a limit in {len(cut)} of {len(evaluations)} evaluations (first: "
            f"step {cut[0]['step']})"
        )
    told: set[str] = set()
    for row in rows:
        for kind, line in row_notices(row).items():
            if kind in ("accuracy", "warm start") and kind not in told:
                told.add(kind)
                lines.append(line)
    return lines


def _idle(steps: Sequence[Row]) -> list[str]:
    idle = [row for row in steps if IDLE in row]
    if not idle:
        return []
    counts = Counter(str(row[IDLE]) for row in idle)
    reasons = [f"{count} x {reason}" for reason, count in counts.most_common(MOST_REASONS)]
    more = f"; and {len(counts) - MOST_REASONS} more reasons" if len(counts) > MOST_REASONS else ""
    first = idle[0]["step"]
    return [f"{len(idle)} of {len(steps)} steps trained nothing (first: step {first}): {'; '.join(reasons)}{more}"]


def _truncated(steps: Sequence[Row]) -> list[str]:
    cut = [row for row in steps if row.get("response/truncated") == 1]
    if not cut:
        return []
    count = sum(row.get("rollout/episodes", 0) for row in cut)
    uncalled = NOT_CALLED if all(row.get("reward/called") == 0 for row in cut) else ""
    where = f"{len(cut)} of {len(steps)} steps ({count:g} responses, first: step {cut[0]['step']})"
    return [f"every response was cut off by a limit in {where}{uncalled}"]


def _constant(steps: Sequence[Row]) -> list[str]:
    scored = [row for row in steps if "reward/min" in row]
    values = {row[name] for row in scored for name in ("reward/min", "reward/max")}
    if len(values) != 1:
        return []
    count = sum(row.get("rollout/episodes", 0) for row in scored)
    told = f"every reward was {shown(values.pop())} ({count:g} responses, {len(scored)} steps)"
    return [f"{told}: rewards that are all the same tell no response from another"]
