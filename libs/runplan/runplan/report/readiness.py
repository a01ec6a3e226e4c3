"""Refusal of a run that can't be done, before anything is read or made."""

from engines.capability import Unsupported
from runplan.report.plan import make_plan
from runplan.run_spec import RunSpec


def refuse_unready(spec: RunSpec) -> None:
    """Raise ValueError for a run whose plan has problems or requires what is missing."""
    plan = make_plan(spec)
    reasons = [*plan.problems]
    for requirement in plan.missing:
        assert isinstance(requirement.answer, Unsupported)
        reasons.append(f"{requirement.feature} is not supported: {requirement.answer.reason}")
    if reasons:
        more = f" (and {len(reasons) - 3} more)" if len(reasons) > 3 else ""
        first = "; ".join(reasons[:3])
        raise ValueError(f"recipe {spec.recipe!r} can't be run with these settings: {first}{more}; --plan says all")
