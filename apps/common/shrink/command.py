"""The flag `--shrink`, and the lines that list every difference, or the reasons why a recipe can't be shrunk."""

import sys
from collections.abc import Sequence

from apps.common.cli.flags import flag, leaves
from apps.common.cluster import Cluster, RolloutLayout
from apps.common.shrink.fields import Difference, ProcessLimit
from apps.common.shrink.npu import with_fake_npu
from engines.capability import Unsupported
from engines.launch import under_torchrun
from runplan.report.plan import make_plan
from runplan.run_spec import RunSpec

TEXT_ALONE = "--engine.vision off --media.images-column None"
NO_VLLM, ENGINE = "--no-vllm", "--rollout.engine"
NATIVE = {ENGINE: RolloutLayout.engine, "--rollout.ray-workers": "0", "--pools.placement": "colocated"}
"""What `--no-vllm` stands for: the native sampler, in processes of the run itself."""
LEFT_OUT = {
    "vision": TEXT_ALONE,
    "images shown to the sampler": TEXT_ALONE,
    "reference policy": "--objective.kl-coef 0",
}
"""Flags that leave out what a requirement is for, where its name is no flag."""


def parse_shrink_flag(argv: Sequence[str]) -> tuple[list[str], ProcessLimit | None]:
    """Return the command line without `--shrink` or `--shrink=PROCESSES`, and its limit of processes; None without it.

    Raises:
        ValueError: PROCESSES is no number above 0, or torchrun started this process.
    """
    rest = [word for word in argv if word != "--shrink" and not word.startswith("--shrink=")]
    limits = [word.partition("=")[2] for word in argv if word not in rest]
    if not limits:
        return rest, None
    if under_torchrun():
        raise ValueError("--shrink starts its own processes: leave torchrun out")
    if limits[-1] and not (limits[-1].isdigit() and int(limits[-1])):
        raise ValueError(f"--shrink={limits[-1]} must be the most processes that may be started, such as --shrink=4")
    return rest, ProcessLimit(int(limits[-1])) if limits[-1] else ProcessLimit()


def without_vllm(argv: Sequence[str]) -> list[str]:
    """Return the command line with the flags of NATIVE that it does not have in place of `--no-vllm`.

    Raises:
        ValueError: there is no `--shrink`, or a sampler is named too.
    """
    rest = [word for word in argv if word != NO_VLLM]
    if len(rest) == len(argv):
        return rest
    if not any(word.partition("=")[0] == "--shrink" for word in rest):
        raise ValueError(f"{NO_VLLM} is of shrunk runs: use --rollout.engine native, or add --shrink")
    given = {word.partition("=")[0] for word in rest}
    if ENGINE in given:
        raise ValueError(f"{NO_VLLM} and {ENGINE} both name a sampler: leave one of them out")
    return rest + [word for name, value in NATIVE.items() if name not in given for word in (name, value)]


def print_differences(recipe: str, differences: Sequence[Difference | str]) -> None:
    """Print how the run differs from its recipe, by flags and by shrinking."""
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
