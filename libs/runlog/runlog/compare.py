"""One page about several runs: their figures, their curves in one chart each, the settings that differ."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runlog import store
from runlog.curves import charts, key_figures
from runlog.page import render, write
from runlog.report import PAGE_BYTES, charts_within, read_config

MOST_RUNS = 8  # colours that a reader tells apart
NONE = "-"


def write_comparison(
    run_dirs: Sequence[Path], target: Path, max_points: int = 400, max_bytes: int = PAGE_BYTES
) -> Path:
    """Write a page that compares two to eight runs, and return its path. Needs the extra `tessera-runlog[report]`.

    Raises:
        ValueError: too few or too many runs, one twice, or one without metrics.
    """
    if not 2 <= len({path.resolve() for path in run_dirs}) == len(run_dirs) <= MOST_RUNS:
        raise ValueError(f"compare takes two to {MOST_RUNS} different run directories, not {len(run_dirs)}")
    metrics = [store.read_metrics(path) for path in run_dirs]
    if empty := [path for path, rows in zip(run_dirs, metrics, strict=True) if not rows]:
        raise ValueError(f"{empty[0] / store.METRICS} is missing or empty: there is nothing to compare")
    tiles = [{t["label"]: f"{t['value']} ({t['note']})" for t in key_figures(rows, None)} for rows in metrics]
    for table, rows in zip(tiles, metrics, strict=True):
        table["Steps"] = str(rows[-1]["step"])
    settings = _rows([dict(read_config(path)) for path in run_dirs])
    differing = [(name, values) for name, values in settings if len(set(values)) > 1]
    room = int(0.8 * max_bytes)
    changing = {chart["name"] for rows in metrics for chart in charts(rows, 2)}
    made = _joined([charts_within(rows, max_points, room // len(metrics), changing) for rows in metrics])
    return write(
        target,
        render(
            "compare.html.j2",
            {"charts": made},
            title=f"{len(run_dirs)} runs compared",
            runs=[{"name": name} for name in names_of(run_dirs)],
            figures=_rows(tiles),
            settings=differing,
            same=len(settings) - len(differing),
            no_room=len(changing) - len(made),
        ),
    )


def names_of(run_dirs: Sequence[Path]) -> list[str]:
    """Return the directories' names, with as many folders above them as tell them apart."""
    parts, depth = [path.resolve().parts for path in run_dirs], 1
    while len({part[-depth:] for part in parts}) < len(parts):
        depth += 1
    return ["/".join(part[-depth:]) for part in parts]


def _rows(tables: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """Return a row a name of any of the tables, in their order, with each table's value."""
    return [(name, [table.get(name, NONE) for table in tables]) for name in dict.fromkeys(n for t in tables for n in t)]


def _joined(made: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the charts of all runs, those of one metric in one chart."""
    joined: dict[str, dict[str, Any]] = {}
    for run, one_run in enumerate(made):
        for chart in one_run:
            line = {key: chart[key] for key in ("x", "y", "smooth", "first", "last")}
            shared = {key: chart[key] for key in ("name", "title", "unit", "known", "rounding", "marks", "percent")}
            one = joined.setdefault(chart["name"], {**shared, "lines": []})
            one["rounding"] = one["rounding"] and chart["rounding"]
            one["lines"].append({"run": run, **line})
    return list(joined.values())
