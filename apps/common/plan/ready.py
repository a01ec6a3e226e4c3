"""A run that can't be done is refused before anything is read or made."""

from collections.abc import Mapping

from apps.common.plan.needs import missing_variables
from apps.common.plan.report import make_plan
from apps.common.plan.work import Work
from engines.capability import No


def refuse_unready(work: Work, environ: Mapping[str, str]) -> None:
    """Raise ValueError for a run whose plan has problems, needs what is missing, or whose variables are not set.

    The variables of `cluster.environment` act when libraries are imported, so that whoever starts the program sets
    them; the plan's launch lines do.
    """
    plan = make_plan(work)
    reasons = [*plan.problems]
    for need in plan.missing:
        assert isinstance(need.answer, No)
        reasons.append(f"{need.feature} is not supported: {need.answer.reason}")
    if reasons:
        more = f" (and {len(reasons) - 3} more)" if len(reasons) > 3 else ""
        said = "; ".join(reasons[:3])
        raise ValueError(f"recipe {work.recipe!r} can't be run with these settings: {said}{more}; --plan says all")
    unset = missing_variables(work.cluster.environment, environ)
    if unset:
        raise ValueError(
            f"start the program with {' '.join(unset)} in front: --cluster.environment names it, and it acts when "
            "libraries are imported"
        )
