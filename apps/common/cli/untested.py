"""The flag `--allow-untested`: what a run may have although no proof and no test has run it, each accepted by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:  # a command line reads the flag without torch
    from engines.prove.certificate import Certificate
    from runplan.run_spec import RunSpec

FLAG = "--allow-untested"
NAMES = {
    "npu": "Ascend NPUs",
    "nodes": "more than one machine",
    "sampler": "a sampler whose log-probs are past the bound",
    "deepep": "DeepEP in place of the all-to-all of experts",
    "teacher": "a teacher of the native engine or vLLM beside training on a GPU or NPU",
}
"""Names beside config fields. "sampler" is of what the first batch shows."""
HELP = (
    "What may go untested, by name: config fields that no part of the model's proof exercised, and hardware that was "
    "not at hand (npu, nodes, deepep, teacher). It is recorded, and stands at the head of the report."
)
FLAG_TYPE: Any = Annotated[
    tuple[str, ...],
    tyro.conf.arg(name=FLAG.removeprefix("--"), prefix_name=False, help=HELP),
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME,...",
        instance_from_str=lambda words: tuple(name for word in words for name in word.split(",") if name),
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=list,
    ),
]
"""The flag's type: names with commas or blanks between them."""


def untested_parts(spec: RunSpec, certificates: Iterable[Certificate]) -> dict[str, str]:
    """Return what of a run no test and no proof has run, by the names that accept it, each with the reason."""
    from runplan.checks.requirements import requirements  # it imports torch

    parts: dict[str, list[str]] = {}
    for requirement in requirements(spec):
        if requirement.untested is not None:
            parts.setdefault(requirement.untested, []).append(f"{requirement.feature}: {requirement.answer.reason}")  # type: ignore[union-attr]
    for certificate in certificates:
        for name in certificate.not_exercised:
            parts.setdefault(name, []).append(f"no part of the proof of {certificate.model_type} exercised it")
    return {name: "; ".join(reasons) for name, reasons in parts.items()}


def unknown_names(names: Sequence[str], parts: Mapping[str, str], fields: Collection[str]) -> list[str]:
    """Return the text of a refusal for names that are of no part of a run, nor of any, nor `fields` of its model's
    config; empty where there are none."""
    unknown = [name for name in names if name not in {*NAMES, *parts, *fields}]
    if not unknown:
        return []
    here = f"untested here: {', '.join(parts)}" if parts else "nothing here is untested: leave it out"
    others = f"names are {', '.join(NAMES)} and fields of the model's config.json"
    return [f"{FLAG} {','.join(unknown)}: {others}; {here}"]


def names_of_nothing(spec: RunSpec) -> list[str]:
    """Return the text of a plan's problem for names that the run would refuse; empty where there are none, or where the
    model that is named can't be read yet."""
    if not spec.engine.allow_untested:
        return []
    fields: Collection[str] | None = spec.config_fields
    if fields is None and spec.unknown is None and spec.origin is not None:
        from transformers import AutoConfig  # of a recipe that gives the sizes of a model

        from apps.common.data.model_files import config_fields  # it imports torch

        fields = config_fields(AutoConfig.for_model(spec.origin.shape.model_type))
    if fields is None and not spec.needs_model:
        fields = ()  # the recipe's own model, of a registered family
    return [] if fields is None else unknown_names(spec.engine.allow_untested, untested_parts(spec, ()), fields)


def unused_names(names: Sequence[str], parts: Mapping[str, str]) -> list[str]:
    """Return a line for names that this run does not need; empty where there are none."""
    unneeded = [name for name in names if name not in parts and name != "sampler"]
    return [f"{FLAG} {','.join(unneeded)} was not needed: tests or a proof have run it"] if unneeded else []
