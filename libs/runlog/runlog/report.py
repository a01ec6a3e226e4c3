"""One self-contained page about a run: curves, a browser of sampled episodes, the configuration.

Sizes are bounded whatever the run's length, and the page says what was left out.
"""

import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from runlog import store
from runlog.curves import charts, key_figures, series, unchanged
from runlog.display import shown
from runlog.episodes import view
from runlog.health import check_health
from runlog.notices import run_notices
from runlog.page import render, size, write
from runlog.proofs import read_proofs, read_untested, untested_lines
from runlog.sampling import HELD_OUT, TRAINING, draw_groups
from runlog.timeline import read_timeline, timeline_figure

REPORT = "report.html"
PAGE_BYTES = 1_000_000
HELD_OUT_SHARE = 0.3  # of the room for episodes
CHART_SHARE = 0.35  # of the page
MIN_POINTS = 20
MOST_UNCHANGED = 200  # metrics that never changed, in a table
CUTS = ((1200, 20_000), (300, 4_000), (60, 500), (8, 60))  # tokens and characters of an episode that stay


def write_report(
    run_dir: Path | str,
    title: str | None = None,
    max_points: int = 600,
    max_groups: int = 120,
    max_bytes: int = PAGE_BYTES,
    seed: int = 0,
) -> Path:
    """Write `report.html` into the run directory and return its path. Needs the extra `tessera-runlog[report]`.

    It can be written at any time, also while the run goes on. The page has at most `max_bytes` (but for a configuration
    that is itself larger): a curve keeps at most `max_points` points (means of equal stretches), and fewer where there
    are many curves; the browser has at most `max_groups` groups of episodes and as many held-out ones, drawn at random
    by `seed` (`runlog.sampling`), as many as fit; long episodes lose their middle.

    Raises:
        ValueError: the run has no metrics yet, or a file holds what no run wrote; the text names file and line.
    """
    return write(Path(run_dir) / REPORT, report_page(Path(run_dir), title, max_points, max_groups, max_bytes, seed))


def report_page(
    run_dir: Path,
    title: str | None = None,
    max_points: int = 600,
    max_groups: int = 120,
    max_bytes: int = PAGE_BYTES,
    seed: int = 0,
    live: bool = False,
) -> str:
    """Return the page that `write_report` writes; `live`: one that takes new rows from `runlog.serve`.

    Raises:
        ValueError: see `write_report`.
    """
    metrics = store.read_metrics(run_dir)
    if not metrics:
        raise ValueError(f"{run_dir / store.METRICS} is missing or empty; log metrics before writing a report")
    path = run_dir / store.EPISODES
    drawn = {split: draw_groups(path, max_groups, split, seed) for split in (HELD_OUT, TRAINING)}
    logged = sum(sample.logged for sample in drawn.values())
    curves = charts_within(metrics, max_points, int(CHART_SHARE * max_bytes))
    data: dict[str, Any] = {"charts": curves, "episodes": [], "episodes_logged": logged}
    page = _page(run_dir, title, metrics, logged, data, live)
    room = max_bytes - len(page.encode())
    for split, sample in drawn.items():
        share = HELD_OUT_SHARE if split == HELD_OUT and drawn[TRAINING].logged else 1.0
        shown, used = _groups_within(sample.groups, int(room * share))
        data["episodes"] += shown
        room -= used
    data["episodes"].sort(key=lambda episode: episode["id"])
    return _page(run_dir, title, metrics, logged, data, live)


def charts_within(
    metrics: Sequence[Mapping[str, Any]], points: int, room: int, keep: Collection[str] = ()
) -> list[dict[str, Any]]:
    """Return the curves within `room` bytes: fewer points where they are many, then without the last ones; `keep`: see
    `runlog.curves.charts`."""
    made = charts(metrics, points, keep)
    longest = max((len(chart["x"]) for chart in made), default=0)
    while (used := size(made)) > room and longest > MIN_POINTS:
        longest = max(MIN_POINTS, min(longest // 2, int(longest * room / used)))
        made = charts(metrics, longest, keep)
    sizes = itertools.accumulate(size(chart) + 1 for chart in made)
    return [chart for chart, end in zip(made, sizes, strict=True) if end < room]


def _groups_within(
    groups: Sequence[Sequence[tuple[int, dict[str, Any]]]], room: int
) -> tuple[list[dict[str, Any]], int]:
    """Return the views of the first groups that fit in `room`, and their bytes.

    The group that reaches the limit is shown too, cut shorter. Were it left out, long groups would be shown less often
    than they occur. The number of groups depends on the shown ones alone: a stopping rule, for Wald's equation.
    """
    shown: list[dict[str, Any]] = []
    used = 0
    for rows in groups:
        for cut in CUTS:
            views = [view(row, number, *cut) for number, row in rows]
            taken = size(views)
            if used + taken <= room:
                break
        else:
            break
        shown += views
        used += taken
        if cut != CUTS[0]:
            break
    return shown, used


def _page(
    run_dir: Path,
    title: str | None,
    metrics: Sequence[Mapping[str, Any]],
    logged: int,
    data: Mapping[str, Any],
    live: bool,
) -> str:
    flat = unchanged(metrics)
    proofs, more_proofs = read_proofs(run_dir)
    changed, config = split_config(run_dir)
    return render(
        "report.html.j2",
        data,
        live,
        title=title or run_dir.resolve().name,
        tiles=key_figures(metrics, logged),
        notices=[*untested_lines(read_untested(run_dir)), *run_notices(metrics)],
        health=health_rows(metrics),
        proofs=proofs,
        more_proofs=more_proofs,
        episodes=logged,
        unchanged=flat[:MOST_UNCHANGED],
        more_unchanged=max(0, len(flat) - MOST_UNCHANGED),
        no_room=len(series(metrics)) - len(flat) - len(data["charts"]),
        changed=changed,
        config=config,
        timeline=timeline_figure(read_timeline(run_dir)),
    )


def health_rows(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the table of a run's health by its last steps: name, number, threshold, what to change."""
    return [
        {
            "name": check.name,
            "value": shown(check.value),
            "limit": f"{'at least' if check.least else 'at most'} {shown(check.limit)}",
            "change": "" if check.healthy else check.change,
        }
        for check in check_health(metrics)
    ]


def split_config(run_dir: Path) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """Return the settings that differ from the defaults that the run logged, each with its default, and the others."""
    config, defaults = read_config(run_dir), dict(read_config(run_dir, store.DEFAULTS))
    changed = [(name, value, defaults[name]) for name, value in config if defaults.get(name, value) != value]
    if defaults:
        changed += [(name, value, "") for name, value in config if name not in defaults]
    names = {row[0] for row in changed}
    return changed, [(name, value) for name, value in config if name not in names]


def read_config(run_dir: Path, name: str = store.CONFIG) -> list[tuple[str, str]]:
    """Return a run's configuration as (dotted name, value) rows; none where it logged none."""
    path = run_dir / name
    return flat_config(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else []


def flat_config(config: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Return a nested configuration as (dotted name, value) rows, in its own order."""
    if isinstance(config, Mapping) and config:
        rows = []
        for name, value in config.items():
            rows += flat_config(value, f"{prefix}.{name}" if prefix else str(name))
        return rows
    if not prefix:
        return []
    return [(prefix, config if isinstance(config, str) else json.dumps(config, ensure_ascii=False))]
