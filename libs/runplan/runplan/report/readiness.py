"""Refusal of a run that can't be done, before anything is read or made."""

from engines.capability import Unsupported
from runplan.report.plan import make_plan
from runplan.run_spec import RunSpec


def refuse_unready(spec: RunSpec) -> None:
    """Raise ValueError for a run whose plan has problems or requires what is missing."""
    if reasons := unready(spec):
        told = "; ".join(reasons)
        raise ValueError(f"recipe {spec.recipe!r} can't be run with these settings: {told}; --plan says all")


def unready(spec: RunSpec) -> list[str]:
    """Return the text of each problem of the plan, and of each requirement that is missing."""
    plan = make_plan(spec)
    reasons = [*plan.problems]
    for requirement in plan.missing:
        assert isinstance(requirement.answer, Unsupported)
        text = f"{requirement.feature} is not supported: {requirement.answer.reason}"
        if requirement.untested:
            text += f"; --allow-untested {requirement.untested} runs it all the same"
        reasons.append(text)
    return list(dict.fromkeys(reasons))
