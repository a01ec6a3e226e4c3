"""Draw docs/plan.svg, the plan of one batch over eight ranks, as dyncp makes it: `./bazelw run //docs:draw_plan`.

A row is a rank, a column a step; a box is a group of ranks, and its filled part the tokens that each of them holds.
"""

import os
from html import escape
from pathlib import Path

from dyncp import DynamicPlan, plan

LENGTHS = (5200, 3100, 1500, 1400, 900, 900, 800, 700, 640, 600, 520, 500, 420, 400, 350, 300, 300, 280, 260, 240, 220)
RANKS, CAP = 8, 1024
LEFT, TOP, WIDTH, ROW, GAP = 78, 64, 250, 30, 14
FONT = "font-family='Helvetica, Arial, sans-serif'"
COLORS = ("#9ec5e8", "#b9dcae", "#f7d08a", "#e3b5d6", "#c9c3ea", "#f2b8a2", "#a8d8d8", "#d8cfa8")


def text(x: float, y: float, words: str, size: float = 12.5, more: str = "") -> str:
    """Return a line of text."""
    return f"<text x='{x}' y='{y}' font-size='{size}' {more} {FONT}>{escape(words)}</text>"


def group(step: int, number: int, ranks: tuple[int, ...], lengths: list[int]) -> list[str]:
    """Return a group's box, with its ranks' tokens and its sequences."""
    x, y = LEFT + step * (WIDTH + GAP), TOP + ranks[0] * ROW
    height = len(ranks) * ROW - 4
    mean = sum(lengths) / len(ranks)
    words = " + ".join(f"{length:,}" for length in lengths) or "nothing"
    words += f" tokens, {len(ranks)} ranks" if len(ranks) > 1 else ""
    place = f"<rect x='{x}' y='{y}' height='{height}' rx='4' stroke='#777'"
    return [
        f"{place} width='{WIDTH}' fill='#f4f4f4'/>",
        f"{place} width='{WIDTH * mean / CAP:.0f}' fill='{COLORS[number % len(COLORS)]}'/>",
        text(x + 8, y + height / 2 + 4, words),
    ]


def picture(made: DynamicPlan) -> str:
    """Return the whole SVG file."""
    width = LEFT + len(made.steps) * (WIDTH + GAP) + 6
    height = TOP + RANKS * ROW + 12
    title = (
        f"{len(LENGTHS)} sequences of {min(LENGTHS)} to {max(LENGTHS):,} tokens over {RANKS} ranks of {CAP:,} tokens"
    )
    out = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'>",
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
        text(LEFT, 22, title, 15, "font-weight='bold'"),
        *(text(6, TOP + rank * ROW + 18, f"rank {rank}", 12.5, "fill='#333'") for rank in range(RANKS)),
    ]
    for number, step in enumerate(made.steps):
        out.append(text(LEFT + number * (WIDTH + GAP), TOP - 10, f"step {number}", 12.5, "fill='#333'"))
        for index, ranks_group in enumerate(step.groups):
            out += group(number, index, ranks_group.ranks, [LENGTHS[i] for i in ranks_group.sample_ids])
    return "\n".join([*out, "</svg>"]) + "\n"


def main() -> None:
    """Write docs/plan.svg."""
    docs = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", ".")) / "docs"
    (docs / "plan.svg").write_text(picture(plan(LENGTHS, RANKS, CAP)))
    print("docs/plan.svg")


if __name__ == "__main__":
    main()
