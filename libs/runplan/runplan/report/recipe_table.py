"""A table of all recipes of an app: what they train, where, and which can be run today, in full or shrunk."""

from collections.abc import Iterable

from runplan.report.plan import Plan, make_plan
from runplan.run_spec import RunSpec

HEAD = ("recipe", "model", "engine", "devices", "deviations from its script", "state", "with --shrink")


def recipe_table(specs: Iterable[tuple[RunSpec, RunSpec]]) -> str:
    """Return a Markdown table of recipes, each with its shrunk form, and a closing line with counts.

    Deviations are those from the launch script that a recipe restates, which its plan has in words.
    What starts by `--allow-untested` alone is counted apart, not as what can be run.
    """
    rows = [(spec, make_plan(spec), make_plan(small)) for spec, small in specs]
    ready, shrunk = sum(plan.ready for _, plan, _ in rows), sum(small.ready for _, _, small in rows)
    cells = [HEAD, tuple("---" for _ in HEAD), *(_row(*row) for row in rows)]
    untested = sum(bool(plan.to_allow) for _, plan, _ in rows)
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    counts = f"{len(rows)} recipes, {ready} can be run today, {untested} untested, {shrunk} shrunk"
    return "\n".join([*lines, "", counts])


def _row(spec: RunSpec, plan: Plan, small: Plan) -> tuple[str, ...]:
    model = spec.shape.name if spec.shape else "your own" if spec.needs_model else "made on the spot"
    names = {"auto": "GPU or CPU", "cuda": "GPU"}
    device = names.get(spec.engine.device, spec.engine.device.upper())
    rollout = spec.rollout_ranks if spec.cluster.pools.placement == "separate" else 0
    devices = f"{spec.ranks + rollout} {device}"
    missing = len({requirement.answer for requirement in plan.missing})
    state = "runs" if plan.ready else f"plan only: {missing} missing"
    if plan.to_allow:
        state = f"untested: {', '.join(plan.to_allow)}"
    if plan.problems:
        state = f"plan only: {len(plan.problems)} problems"
    without = dict.fromkeys(requirement.feature.partition(" ")[0] for requirement in small.missing)
    alone = "runs" if small.ready else f"refused: {', '.join([*without, *small.problems])}"
    deviations = str(len(spec.origin.deviations)) if spec.origin else "-"
    return (spec.recipe, model, spec.engine.backend, devices, deviations, state, alone)
