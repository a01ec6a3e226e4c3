"""The command `--shrink`: the lines that list every difference, or the reasons why a recipe can't be shrunk."""

import os
import sys
from collections.abc import Sequence

from apps.common.cli.flags import flag, leaves
from apps.common.cluster import Cluster, RolloutLayout
from apps.common.shrink.fields import Difference
from apps.common.shrink.flag import ENGINE
from apps.common.shrink.npu import with_fake_npu
from engines.capability import Unsupported
from runplan.report.plan import make_plan
from runplan.run_spec import RunSpec

TEXT_ALONE = "--trainer.vision off --media.images-column None"
LEFT_OUT = {
    "vision": TEXT_ALONE,
    "images shown to the sampler": TEXT_ALONE,
    "reference policy": "--objective.kl-coef 0",
}
"""Flags that leave out what a requirement is for, where its name is no flag."""


def print_differences(recipe: str, differences: Sequence[Difference | str]) -> None:
    """Print how the run differs from its recipe, by flags and by shrinking; of torchrun's ranks the first does."""
    if int(os.environ.get("RANK", "0")):
        return
    lines = [f"{recipe}, shrunk: the recipe's settings but for these", *map(str, differences)]
    sys.stdout.write("\n".join(lines) + "\n")


def check_nothing_dropped(spec: RunSpec) -> None:
    """Raise ValueError that names all features which a shrunk run would lack, each with its reason."""
    plan = make_plan(with_fake_npu(spec))
    reasons = [*plan.problems]
    for requirement in plan.missing:
        assert isinstance(requirement.answer, Unsupported)
        reasons.append(f"{requirement.feature}: No({requirement.answer.reason})")
    if not reasons:
        return
    flags = dict.fromkeys(_flag_without(requirement.feature, spec) for requirement in plan.missing)
    known = " ".join(word for word in flags if word)
    rest = f" What can be left out by name: {known}" if known else ""
    raise ValueError(
        f"recipe {spec.recipe!r} can't be shrunk, and nothing is left out silently. {'; '.join(reasons)}.{rest}"
    )


def _flag_without(feature: str, spec: RunSpec) -> str | None:
    """Return the flag that turns a feature off; None where there is none."""
    name = feature.partition(" ")[0]
    for path, default, _ in leaves(Cluster(), "cluster."):
        if flag(path) != name:
            continue
        if default is False:
            before, _, last = name.rpartition(".")
            return f"{before}.no-{last}"
        return name if default == () else f"{name} {default}"
    if feature in spec.cluster.sampler.requirements(spec):
        return f"{ENGINE} {RolloutLayout.engine}"
    return LEFT_OUT.get(feature)
