"""A few SVG shapes with tooltips, and the page they stand on: self-contained, light and dark."""

from collections.abc import Iterable, Sequence
from html import escape

WIDTH = 1120
"""Width of every drawing in pixels."""

RAMP = ("#d6e4f5", "#a9c8ec", "#74a5de", "#3f7fc9", "#1f5a9e")
"""Colours from the shortest to the longest sequence."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>
:root {{ --ink: #1d2430; --soft: #667085; --paper: #ffffff; --line: #e3e7ee; --limit: #c2410c; --idle: #f1d9cc; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e9ef; --soft: #98a2b3; --paper: #14181f; --line: #2b323d; --limit: #fb923c; --idle: #4a3325; }} }}
body {{ margin: 32px auto; max-width: {width}px; padding: 0 16px; background: var(--paper); color: var(--ink);
  font: 14px/1.45 system-ui, sans-serif; }}
h1 {{ font-size: 22px; margin: 0 0 16px; }} h2 {{ font-size: 15px; margin: 28px 0 2px; }}
p {{ color: var(--soft); margin: 0 0 10px; }}
dl {{ display: flex; flex-wrap: wrap; gap: 12px 32px; margin: 0; }}
dt {{ color: var(--soft); font-size: 12px; }} dd {{ margin: 0; font-size: 20px; font-variant-numeric: tabular-nums; }}
svg {{ display: block; width: 100%; height: auto; margin-bottom: 6px; }}
svg text {{ fill: var(--soft); font-size: 11px; font-variant-numeric: tabular-nums; }}
.frame {{ fill: none; stroke: var(--line); }} .limit {{ stroke: var(--limit); stroke-dasharray: 5 4; }}
.idle {{ fill: var(--idle); }} .room {{ fill: var(--line); opacity: .55; }} .bar {{ fill: #3f7fc9; }}
.key {{ display: inline-block; width: 11px; height: 11px; margin: 0 5px 0 14px; border-radius: 2px; }}
</style></head><body>
<h1>{title}</h1>
<dl>{fields}</dl>
{body}
</body></html>
"""


def page(title: str, fields: Iterable[tuple[str, str]], sections: Iterable[str]) -> str:
    """Return the whole document; facts are (label, value)."""
    tiles = "".join(f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in fields)
    return PAGE.format(title=escape(title), fields=tiles, body="\n".join(sections), width=WIDTH)


def section(title: str, note: str, *parts: str) -> str:
    """Return a heading, a line of explanation (may hold markup) and drawings."""
    return f"<h2>{escape(title)}</h2><p>{note}</p>" + "".join(parts)


def drawing(height: float, shapes: Iterable[str]) -> str:
    """Return an SVG of the page's width."""
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">{"".join(shapes)}</svg>'


def rect(x: float, y: float, width: float, height: float, fill: str, tip: str = "") -> str:
    """Return a rectangle; `fill` is a colour, or a class when it starts with a dot."""
    paint = f'class="{fill[1:]}"' if fill.startswith(".") else f'fill="{fill}"'
    title = f"<title>{escape(tip)}</title>" if tip else ""
    size = f'width="{max(width, 0):.2f}" height="{max(height, 0):.2f}"'
    return f'<rect x="{x:.2f}" y="{y:.2f}" {size} {paint}>{title}</rect>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """Return a line of a class."""
    return f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" class="{kind}"/>'


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """Return a label; `anchor` is start, middle or end."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def color_of(value: float, scale: Sequence[float]) -> str:
    """Return the colour of a value between the boundaries that `color_bounds` chose."""
    return RAMP[sum(value > bound for bound in scale)]


def color_bounds(values: Sequence[float]) -> list[float]:
    """Return four boundaries that give each colour a fifth of the values."""
    ordered = sorted(values)
    return [ordered[len(ordered) * step // 5] for step in range(1, 5)] if ordered else []


def legend(scale: Sequence[float], *others: tuple[str, str], form: str = ",.0f") -> str:
    """Return the legend of the colours, and of other (colour, words) pairs, as markup for a section's note."""
    bounds = [f"≤ {bound:{form}}" for bound in scale] + [f"> {scale[-1]:{form}}"] if scale else []
    keys = list(zip(RAMP, bounds, strict=False))
    return "".join(
        f'<span class="key" style="background:{colour}"></span>{escape(words)}' for colour, words in [*keys, *others]
    )
