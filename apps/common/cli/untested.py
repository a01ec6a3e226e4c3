"""The flag `--allow-untested`: what a run may have although no proof and no test has run it, each accepted by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:  # a command line reads the flag without torch
    from transformers import PretrainedConfig

    from engines.prove.certificate import Certificate
    from runplan.run_spec import RunSpec

FLAG = "--allow-untested"
NAMES = {
    "npu": "Ascend NPUs",
    "nodes": "more than one machine",
    "sampler": "a sampler whose log-probs are past the bound",
}
"""Names beside config fields. "sampler" is of what the first batch shows."""
HELP = (
    "What may go untested, by name: config fields that no part of the model's proof exercised, and hardware that was "
    "not at hand (npu, nodes). It is recorded, and stands at the head of the report."
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
    from runplan.checks.requirements import requirements

    parts: dict[str, list[str]] = {}
    for requirement in requirements(spec):
        if requirement.untested is not None:
            parts.setdefault(requirement.untested, []).append(f"{requirement.feature}: {requirement.answer.reason}")  # type: ignore[union-attr]
    for certificate in certificates:
        for name in certificate.not_exercised:
            parts.setdefault(name, []).append(f"no part of the proof of {certificate.model_type} exercised it")
    return {name: "; ".join(reasons) for name, reasons in parts.items()}


def unknown_names(names: Sequence[str], parts: Mapping[str, str], model: PretrainedConfig) -> list[str]:
    """Return the text of a refusal for names that are of no part of a run, nor of any; empty where there are none."""
    known = {*NAMES, *parts, *model.to_dict(), *model.get_text_config().to_dict()}
    unknown = [name for name in names if name not in known]
    if not unknown:
        return []
    here = f"untested here: {', '.join(parts)}" if parts else "nothing here is untested: leave it out"
    others = f"names are {', '.join(NAMES)} and fields of the model's config.json"
    return [f"{FLAG} {','.join(unknown)}: {others}; {here}"]


def unused_names(names: Sequence[str], parts: Mapping[str, str]) -> list[str]:
    """Return a line for names that this run does not need; empty where there are none."""
    unneeded = [name for name in names if name not in parts and name != "sampler"]
    return [f"{FLAG} {','.join(unneeded)} was not needed: tests or a proof have run it"] if unneeded else []
