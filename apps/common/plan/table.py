"""All recipes of an app in a table: what they train, where, and which can be run today."""

from collections.abc import Iterable

from apps.common.plan.report import Plan, make_plan
from apps.common.plan.work import Work

HEAD = ("recipe", "model", "engine", "devices", "state")


def recipe_table(works: Iterable[Work]) -> str:
    """A Markdown table and a closing line that counts."""
    rows = [(work, make_plan(work)) for work in works]
    ready = sum(plan.ready for _, plan in rows)
    cells = [HEAD, tuple("---" for _ in HEAD), *(_row(work, plan) for work, plan in rows)]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    return "\n".join([*lines, "", f"{len(rows)} recipes, {ready} can be run today"])


def _row(work: Work, plan: Plan) -> tuple[str, ...]:
    model = work.origin.shape.name if work.origin else "your own" if work.needs_model else "made on the spot"
    names = {"auto": "GPU or CPU", "cuda": "GPU"}
    device = names.get(work.engine.device, work.engine.device.upper())
    rollout = work.rollout_ranks if work.cluster.pools.placement == "separate" else 0
    devices = f"{work.ranks + rollout} {device}"
    missing = len({need.answer for need in plan.missing})
    state = "runs" if plan.ready else f"plan only: {missing} missing"
    if plan.problems:
        state = f"plan only: {len(plan.problems)} problems"
    return (work.recipe, model, work.engine.backend, devices, state)
