"""What `--shrink` says before a shrunk run begins: every difference, and why it can't begin where it can't."""

import sys
from collections.abc import Sequence

from apps.common.cli.flags import flag, leaves
from apps.common.cluster import Cluster
from apps.common.plan.report import make_plan
from apps.common.plan.work import Work
from apps.common.shrink.fields import Difference, Most
from engines.capability import No
from engines.launch import under_torchrun

TEXT_ALONE = "--engine.vision off --cluster.media.images-column None"
LEFT_OUT = {
    "vision": TEXT_ALONE,
    "images shown to the sampler": TEXT_ALONE,
    "reference policy": "--objective.kl-coef 0",
    "vLLM beside NPUs": "--cluster.rollout.engine native",
}
"""Flags that leave out what a need is for, where its name is no flag."""


def asked_for(argv: Sequence[str]) -> tuple[list[str], Most | None]:
    """Return the command line without `--shrink`, or `--shrink=PROCESSES`, and how many processes it allows; None
    without it.

    Raises:
        ValueError: PROCESSES is no number above 0, or torchrun started this process.
    """
    rest = [word for word in argv if word != "--shrink" and not word.startswith("--shrink=")]
    given = [word.partition("=")[2] for word in argv if word not in rest]
    if not given:
        return rest, None
    if under_torchrun():
        raise ValueError("--shrink starts its own processes: leave torchrun out")
    if given[-1] and not (given[-1].isdigit() and int(given[-1])):
        raise ValueError(f"--shrink={given[-1]} must be the most processes that may be started, such as --shrink=4")
    return rest, Most(int(given[-1])) if given[-1] else Most()


def tell(recipe: str, differences: Sequence[Difference]) -> None:
    """Print what is not as in the recipe: what flags changed, and what shrinking did."""
    lines = [f"{recipe}, shrunk: the recipe's settings but for these", *map(str, differences)]
    sys.stdout.write("\n".join(lines) + "\n")


def refuse_dropped(work: Work) -> None:
    """Raise ValueError that names all that a shrunk run would have to do without, each with its reason."""
    plan = make_plan(work)
    reasons = [*plan.problems]
    for need in plan.missing:
        assert isinstance(need.answer, No)
        reasons.append(f"{need.feature}: No({need.answer.reason})")
    if not reasons:
        return
    flags = dict.fromkeys(_flag_without(need.feature) for need in plan.missing)
    known = " ".join(word for word in flags if word)
    rest = f" What can be left out by name: {known}" if known else ""
    raise ValueError(
        f"recipe {work.recipe!r} can't be shrunk, and nothing is left out silently. {'; '.join(reasons)}.{rest}"
    )


def _flag_without(feature: str) -> str | None:
    """Return the flag that leaves a feature out; None where there is none."""
    name = feature.partition(" ")[0]
    for path, default, _ in leaves(Cluster(), "cluster."):
        if flag(path) != name:
            continue
        if default is False:
            before, _, last = name.rpartition(".")
            return f"{before}.no-{last}"
        return name if default == () else f"{name} {default}"
    return LEFT_OUT.get(feature)
