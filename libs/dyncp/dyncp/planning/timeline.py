"""A plan as a picture: ranks downwards, time to the right, one box a group; a self-contained HTML page."""

import html

from dyncp.planning.types import DynamicPlan, Group

WIDTH, LEFT, TOP = 1100, 70, 70
PALETTE = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")


def timeline_html(plan: DynamicPlan) -> str:
    """Return the page. A step is as wide as its predicted time (equally wide without one); hovering shows samples."""
    seconds = plan.seconds or (1.0,) * len(plan.steps)
    row = max(4.0, min(26.0, 640 / max(plan.world_size, 1)))
    scale = (WIDTH - LEFT - 20) / (sum(seconds) or 1.0)
    parts, x = [], float(LEFT)
    for index, (step, duration) in enumerate(zip(plan.steps, seconds, strict=True)):
        width = duration * scale
        parts.append(f'<text x="{x + 3:.1f}" y="{TOP - 8}" class="s">step {index}</text>')
        parts += [_box(plan, group, x, width, row) for group in step.groups]
        x += width
    height = TOP + plan.world_size * row + 30
    every = max(1, round(14 / row))
    labels = [
        f'<text x="{LEFT - 8}" y="{TOP + rank * row + row / 2 + 4:.1f}" text-anchor="end" class="s">rank {rank}</text>'
        for rank in range(0, plan.world_size, every)
    ]
    return _PAGE.format(
        title=html.escape(f"{plan.name}: {len(plan.lengths)} sequences over {plan.world_size} ranks"),
        facts=html.escape(_facts(plan)),
        width=WIDTH,
        height=f"{height:.0f}",
        body="\n".join(labels + parts),
    )


def _facts(plan: DynamicPlan) -> str:
    total = f", {sum(plan.seconds) * 1e3:.1f} ms predicted" if plan.seconds else ""
    if plan.lower_bound:
        total += f", at most {plan.gap:.1%} over the fastest plan"
    return (
        f"{sum(plan.lengths):,} tokens in {len(plan.steps)} steps{total}; at most {plan.max_tokens_per_rank:,} tokens "
        f"a rank, {plan.fill:.0%} of the slots filled; {plan.method}, {plan.layout}; plan {plan.hash}"
    )


def _box(plan: DynamicPlan, group: Group, x: float, width: float, row: float) -> str:
    top, height = TOP + group.ranks[0] * row, row * group.cp_size
    lengths = [plan.lengths[i] for i in group.sample_ids]
    tokens = plan.tokens_per_rank(group)
    share = tokens / plan.max_tokens_per_rank
    ranks = f"ranks {group.ranks[0]}-{group.ranks[-1]}" if group.cp_size > 1 else f"rank {group.ranks[0]}"
    what = f"samples {list(group.sample_ids)}, lengths {lengths}" if lengths else "no samples: a dummy"
    colour = PALETTE[(group.cp_size.bit_length() - 1) % len(PALETTE)] if lengths else "#ddd"
    label = f"{group.cp_size} x {tokens:,}" if height >= 14 and width >= 70 and lengths else ""
    return (
        f"<g><title>{html.escape(f'{ranks}: {tokens:,} tokens each ({share:.0%} of the cap); {what}')}</title>"
        f'<rect x="{x + 1:.1f}" y="{top + 1:.1f}" width="{max(width - 2, 1):.1f}" height="{max(height - 2, 1):.1f}" '
        f'fill="{colour}" fill-opacity="{0.25 + 0.75 * min(share, 1):.2f}" rx="3"/>'
        f'<text x="{x + 6:.1f}" y="{top + height / 2 + 4:.1f}" class="l">{label}</text></g>'
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font:14px system-ui,sans-serif;margin:24px;color:#222}}.s{{font-size:11px;fill:#666}}
.l{{font-size:11px;fill:#111;pointer-events:none}}rect:hover{{stroke:#000}}</style></head>
<body><h1>{title}</h1><p>{facts}</p>
<p>One box a group of ranks (its size x the tokens each rank holds); darker is fuller, grey is a dummy.</p>
<svg width="{width}" height="{height}" role="img">
{body}
</svg></body></html>
"""
