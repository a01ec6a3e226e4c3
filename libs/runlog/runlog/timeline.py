"""When the parts of a run were busy: spans in lanes, drawn one under the other, with the share of time that is idle.

A file of them (`TIMELINE`) has a span a line, and a line {"start": N} where a process began the run, or went on with it
from its checkpoint of N steps.
"""

import json
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

TIMELINE = "timeline.jsonl"
MOST_SPANS = 600  # in a picture; older ones are left out, and it says so
WIDTH, LANE = 960, 30
COLORS = {"train": "#3b76c4", "sample": "#3f9a62", "sync": "#c9662b", "evaluate": "#8a63b8"}
OTHER = "#888888"


class Span(NamedTuple):
    """A lane was busy with `kind` from `begin` to `end`, in seconds of one clock."""

    lane: str
    kind: str
    begin: float
    end: float


def read_timeline(run_dir: Path | str) -> list[Span]:
    """Return the spans of a run directory, none without a file; a truncated last line is left out.

    Spans after the checkpoint from which a later process resumed are left out, and so is the time in which no process
    ran: each process begins where the one before ended.
    """
    path = Path(run_dir) / TIMELINE
    spans: list[Span] = []
    latest: list[Span] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if "start" in row:
            spans, latest = until_step(joined(spans, latest), int(row["start"])), []
        else:
            latest.append(Span(str(row["lane"]), str(row["kind"]), float(row["begin"]), float(row["end"])))
    return joined(spans, latest)


def joined(before: Sequence[Span], after: Sequence[Span]) -> list[Span]:
    """Return the spans of two processes, the second of which begins as the first ends, by the clock of the second."""
    if not before or not after:
        return [*before, *after]
    late = min(span.begin for span in after) - max(span.end for span in before)
    return [*(s._replace(begin=s.begin + late, end=s.end + late) for s in before), *after]


def until_step(spans: Sequence[Span], steps: int) -> list[Span]:
    """Return the spans of the first `steps` steps: up to the end of the last one, or of the sync that follows it."""
    trained = sorted(span for span in spans if (span.lane, span.kind) == ("trainer", "train"))
    if not steps:
        return []
    if len(trained) < steps:
        return list(spans)  # the file does not tell of all
    last, undone = trained[steps - 1].end, trained[steps].begin if len(trained) > steps else float("inf")
    end = max([last, *(s.end for s in spans if s.kind == "sync" and last <= s.begin < undone)])
    return [s._replace(end=min(s.end, end)) for s in spans if s.begin < end]


def busy_seconds(spans: Iterable[Span]) -> float:
    """Return the seconds in which at least one of the spans ran: overlaps count once."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted((span.begin, span.end) for span in spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def bubble_shares(spans: Sequence[Span]) -> dict[str, float]:
    """Return the idle share of each lane, of the time from the first span of all to the last."""
    if not spans:
        return {}
    whole = max(span.end for span in spans) - min(span.begin for span in spans)
    lanes = dict.fromkeys(span.lane for span in spans)
    return {lane: 1 - busy_seconds(s for s in spans if s.lane == lane) / whole if whole else 0.0 for lane in lanes}


def timeline_figure(spans: Sequence[Span]) -> str:
    """Return an HTML figure of the last spans, a lane a row, with a legend; safe inside a page, whatever lanes are
    called. Only the bars stretch with the page: text has its own size at any width."""
    shown = sorted(spans, key=lambda span: span.begin)[-MOST_SPANS:]
    if not shown:
        return ""
    start, stop = min(s.begin for s in shown), max(s.end for s in shown)
    scale = WIDTH / max(stop - start, 1e-9)
    lanes = list(dict.fromkeys(span.lane for span in spans))
    bubbles = bubble_shares(shown)
    parts = ['<figure class="timeline" style="margin:0"><div style="display:flex;flex-wrap:wrap;gap:4px 16px">']
    for kind in sorted({span.kind for span in shown}):
        swatch = f"display:inline-block;width:12px;height:12px;margin-right:5px;background:{COLORS.get(kind, OTHER)}"
        parts.append(f'<span><i style="{swatch}"></i>{escape(kind)}</span>')
    height = LANE * len(lanes)
    parts.append('</div><div style="display:grid;grid-template-columns:auto minmax(0,1fr);gap:0 10px"><div>')
    parts += [f'<div style="height:{LANE}px;line-height:{LANE}px">{escape(lane)}</div>' for lane in lanes]
    parts.append(
        f'</div><svg viewBox="0 0 {WIDTH} {height}" preserveAspectRatio="none" role="img" aria-label="Timeline"'
    )
    parts.append(f' style="width:100%;height:{height}px;display:block">')
    for span in shown:
        x, width = (span.begin - start) * scale, max(0.5, (span.end - span.begin) * scale)
        text = escape(f"{span.kind}: {span.begin - start:.2f} s to {span.end - start:.2f} s")
        parts.append(
            f'<rect x="{x:.2f}" y="{lanes.index(span.lane) * LANE + 5}" width="{width:.2f}" height="{LANE - 10}" '
            f'fill="{COLORS.get(span.kind, OTHER)}"><title>{text}</title></rect>'
        )
    idle = ", ".join(f"{lane} idle {bubbles.get(lane, 1.0):.0%}" for lane in lanes)
    left = f"; {len(spans) - len(shown)} earlier spans left out" if len(shown) < len(spans) else ""
    parts.append('</svg><div></div><div style="display:flex;justify-content:space-between">')
    parts.append(f"<span>0 s</span><span>{stop - start:.1f} s</span></div></div>")
    parts.append(f"<figcaption>{escape(idle)}{left}</figcaption></figure>")
    return "".join(parts)
