"""Draw a plan: bins and their fill, the load of every rank, what is waited for. One HTML file, no scripts."""

import json
from collections.abc import Sequence

from seqpack.drawing.svg import WIDTH, color_bounds, color_of, drawing, legend, line, page, rect, section, text
from seqpack.planning.balancing import BalancePlan
from seqpack.planning.micro_batches import MicroBatchPlan
from seqpack.planning.packing import PackPlan

MOST_SEQUENCES = 20_000
"""Beyond this, bins are drawn without the sequences in them."""
MOST_BINS = 4_000
"""Beyond this, only the emptiest bins are drawn."""
COLUMNS = 160
FILLS = (0.5, 0.7, 0.85, 0.95)


def render(plan_json: str) -> str:
    """Return the HTML page of a PackPlan, BalancePlan or MicroBatchPlan as JSON; ValueError for anything else."""
    try:
        data = json.loads(plan_json)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a plan: {error}") from error
    kind = data.get("kind") if isinstance(data, dict) else None
    if kind == "PackPlan":
        return _pack_page(PackPlan.from_json(plan_json))
    if kind == "MicroBatchPlan":
        return _micro_batch_page(MicroBatchPlan.from_json(plan_json))
    if kind == "BalancePlan":
        return _balance_page(BalancePlan.from_json(plan_json))
    raise ValueError(f"cannot draw a plan of kind {kind!r}; known are PackPlan, BalancePlan and MicroBatchPlan")


def _pack_page(plan: PackPlan) -> str:
    fields = [
        ("sequences", f"{len(plan.lengths):,}"),
        ("tokens", f"{sum(plan.lengths):,}"),
        ("capacity", f"{plan.capacity:,}"),
        ("bins", f"{len(plan.bins):,}"),
        ("lower bound", f"{plan.lower_bound:,}"),
        ("gap", f"{plan.gap:.3%}"),
        ("fill", f"{plan.fill:.2%}"),
    ]
    return page("Packing plan", fields, [_bins_section("Bins", plan.bins, plan.lengths, plan.capacity)])


def _micro_batch_page(plan: MicroBatchPlan) -> str:
    tokens = [t for rank in plan.tokens for t in rank]
    totals = [sum(rank) for rank in plan.loads]
    mean = sum(totals) / len(totals)
    fields = [
        ("sequences", f"{len(plan.lengths):,}"),
        ("tokens", f"{sum(plan.lengths):,}"),
        ("ranks x micro-batches", f"{len(plan.ranks)} x {plan.num_micro_batches}"),
        ("cap", f"{plan.max_tokens:,}"),
        ("fullest", f"{max(tokens):,}"),
        ("fill", f"{sum(tokens) / (len(tokens) * plan.max_tokens):.2%}"),
        ("max / mean, in lockstep", f"{plan.max_over_mean:.4f}"),
        ("max / mean, rank totals", f"{max(totals) / mean if mean else 1:.4f}"),
        ("split groups", str(len(plan.split_groups))),
        ("hash", f"{plan.hash:x}"),
    ]
    bins = [mb for rank in plan.ranks for mb in rank]
    aligned = [-(-n // plan.align) * plan.align for n in plan.lengths]
    sections = [
        _lockstep_section(plan),
        _bars_section("Load of each rank", "Cost of all its micro-batches; dashed: the mean.", totals, "rank", mean),
        _bins_section("Micro-batches", bins, aligned, plan.max_tokens, "in the order of ranks"),
    ]
    return page("Micro-batch plan", fields, sections)


def _balance_page(plan: BalancePlan) -> str:
    fields = [
        ("costs", f"{len(plan.costs):,}"),
        ("parts", f"{len(plan.parts):,}"),
        ("max / mean", f"{plan.max_over_mean:.5f}"),
        ("over the lower bound", f"{plan.gap:.3%}"),
    ]
    note = "Cost of each part; dashed: the lower bound, which no plan can beat for the heaviest part."
    return page("Balance plan", fields, [_bars_section("Parts", note, plan.loads, "part", plan.lower_bound)])


def _bins_section(
    title: str, bins: Sequence[Sequence[int]], lengths: Sequence[int], capacity: int, order: str = "fullest first"
) -> str:
    """Return a drawing of the bins as columns of sequences up to the capacity, at most 160 bins a row."""
    loads = [sum(lengths[i] for i in items) for items in bins]
    chosen = list(range(len(bins)))
    if order == "fullest first":
        chosen.sort(key=lambda b: -loads[b])
    notes = [f"One column a bin, {order}; a full column is {capacity:,} tokens."]
    if len(bins) > MOST_BINS:
        chosen = sorted(chosen, key=lambda b: loads[b])[:MOST_BINS]
        notes.append(f"Only the {MOST_BINS:,} emptiest of {len(bins):,} are drawn.")
    detailed = sum(len(bins[b]) for b in chosen) <= MOST_SEQUENCES
    if not detailed:
        notes.append(f"Sequences are not told apart: more than {MOST_SEQUENCES:,}.")
    scale = color_bounds(lengths)
    rows = [chosen[start : start + COLUMNS] for start in range(0, len(chosen), COLUMNS)]
    height = max(70, 260 - 20 * len(rows))
    step = min(36.0, WIDTH / max(1, min(COLUMNS, len(chosen))))
    drawings = []
    for row in rows:
        shapes = []
        for column, b in enumerate(row):
            items = sorted(bins[b], key=lambda i: -lengths[i]) if detailed else []
            shapes += _column(column * step, step, height, b, items, lengths, loads[b], capacity, scale)
        drawings.append(drawing(height, shapes))
    key = legend(scale, ("var(--line)", "free"))
    return section(title, " ".join(notes) + f"<br>Tokens of a sequence:{key}", *drawings)


def _column(
    x: float, step: float, height: float, number: int, items: Sequence[int], lengths: Sequence[int], load: int,
    capacity: int, scale: Sequence[float],
) -> list[str]:  # fmt: skip
    """Return one bin: the free room as background, the sequences from the bottom, the longest first."""
    width = step - min(3.0, step / 5)
    tip = f"bin {number}: {load:,} of {capacity:,} tokens ({load / capacity:.1%})"
    shapes = [rect(x, 0, width, height, ".room", tip)]
    if not items and load:
        return [*shapes, rect(x, height * (1 - load / capacity), width, height * load / capacity, ".bar", tip)]
    top = height
    for i in items:
        part = height * lengths[i] / capacity
        top -= part
        gap = 0.6 if part > 2 else 0.0
        shapes.append(
            rect(x, top + gap, width, part - gap, color_of(lengths[i], scale), f"{tip}\nsequence {i}: {lengths[i]:,}")
        )
    return shapes


def _lockstep_section(plan: MicroBatchPlan) -> str:
    """Return a drawing of a row a rank along time, where all wait for the slowest after each micro-batch."""
    loads, tokens = plan.loads, plan.tokens
    slowest = [max(step) for step in zip(*loads, strict=True)]
    total = sum(slowest) or 1.0
    label, high = 64, max(6.0, min(22.0, 420 / len(loads)))
    scale_x = (WIDTH - label) / total
    shapes = []
    for r, rank in enumerate(loads):
        y, x = r * high, float(label)
        if high >= 10 or r % 8 == 0:
            shapes.append(text(label - 8, y + high / 2 + 4, f"rank {r}", "end"))
        for m, load in enumerate(rank):
            size = f"{tokens[r][m]:,} tokens, {len(plan.ranks[r][m])} sequences"
            tip = f"rank {r}, micro-batch {m}: cost {load:,.4g}, {size}"
            box = slowest[m] * scale_x
            busy = load * scale_x
            shapes.append(
                rect(x + busy, y + 1, box - busy - 1, high - 2, ".idle", f"{tip}\nwaits {slowest[m] - load:,.4g}")
            )
            shapes.append(rect(x, y + 1, busy - 1, high - 2, color_of(tokens[r][m] / plan.max_tokens, FILLS), tip))
            x += box
    waiting = 1 - sum(map(sum, loads)) / (total * len(loads)) if sum(slowest) else 0.0
    note = f"Time goes to the right, as long as the cost; {waiting:.2%} of it is waiting.<br>Fill of a micro-batch:"
    return section(
        "Ranks in lockstep",
        note + legend(FILLS, ("var(--idle)", "waiting"), form=".0%"),
        drawing(len(loads) * high, shapes),
    )


def _bars_section(title: str, note: str, values: Sequence[float], name: str, limit: float) -> str:
    """Return a drawing of bars from zero, with a dashed line at `limit`."""
    height, top = 150.0, max([*values, limit, 1e-300]) * 1.05
    step = min(48.0, WIDTH / len(values))
    shapes = []
    for i, value in enumerate(values):
        part = height * value / top
        shapes.append(
            rect(i * step, height - part, step - min(3.0, step / 5), part, ".bar", f"{name} {i}: {value:,.5g}")
        )
        if step >= 24:
            shapes.append(text(i * step + step / 2, height + 14, str(i), "middle"))
    y = height * (1 - limit / top)
    shapes.append(line(0, y, step * len(values), y, "limit"))
    return section(title, note, drawing(height + 18, shapes))
