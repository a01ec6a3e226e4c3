"""All recipes of an app in a table: what they train, where, and which can be run today, in full or shrunk."""

from collections.abc import Iterable

from apps.common.plan.report import Plan, make_plan
from apps.common.plan.work import Work

HEAD = ("recipe", "model", "engine", "devices", "state", "with --shrink")


def recipe_table(works: Iterable[tuple[Work, Work]]) -> str:
    """Return a Markdown table of recipes, each with what it is when it is shrunk, and a closing line that counts."""
    rows = [(work, make_plan(work), make_plan(small)) for work, small in works]
    ready, shrunk = sum(plan.ready for _, plan, _ in rows), sum(small.ready for _, _, small in rows)
    cells = [HEAD, tuple("---" for _ in HEAD), *(_row(*row) for row in rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([*lines, "", f"{len(rows)} recipes, {ready} can be run today, {shrunk} shrunk"])


def _row(work: Work, plan: Plan, small: Plan) -> tuple[str, ...]:
    model = work.origin.shape.name if work.origin else "your own" if work.needs_model else "made on the spot"
    names = {"auto": "GPU or CPU", "cuda": "GPU"}
    device = names.get(work.engine.device, work.engine.device.upper())
    rollout = work.rollout_ranks if work.cluster.pools.placement == "separate" else 0
    devices = f"{work.ranks + rollout} {device}"
    missing = len({need.answer for need in plan.missing})
    state = "runs" if plan.ready else f"plan only: {missing} missing"
    if plan.problems:
        state = f"plan only: {len(plan.problems)} problems"
    without = dict.fromkeys(need.feature.partition(" ")[0] for need in small.missing)
    alone = "runs" if small.ready else f"refused: {', '.join([*without, *small.problems])}"
    return (work.recipe, model, work.engine.backend, devices, state, alone)
