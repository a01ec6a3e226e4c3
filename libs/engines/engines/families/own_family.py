"""A model family of a user's, by FILE.py:NAME: it stands in for what a proof would find by a model's structure."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from engines.config import EngineConfig
from engines.families.family import Family
from engines.families.registry import FAMILIES
from seqpack.extensions.load_object import file_hash, load_object
from seqpack.extensions.options import bound

_OWN: dict[str, tuple[Family, str]] = {}
"""Families of users in this process, by model type, each with what it depends on: name, options and the file's hash."""


def use_own_family(config: EngineConfig) -> None:
    """Let this process have the family that a configuration names, where it names one.

    Raises:
        ValueError: there is none, it takes other options, or one of its model types is a registered family's.
    """
    if config.family is None:
        if config.family_options:
            raise ValueError("family_options has no effect without family: leave it out")
        return
    family = family_of_code(config.family, config.family_options)
    for known in FAMILIES:
        if taken := {*known.model_types, *known.wrappers}.intersection((*family.model_types, *family.wrappers)):
            raise ValueError(f"family {config.family}: model type {taken.pop()!r} belongs to the family {known.name}")
    depends = f"{config.family.rpartition(':')[2]} {config.family_options} {file_hash(config.family)}"
    for kind in (*family.model_types, *family.wrappers):
        _OWN[kind] = replace(family, registered=False), depends


def family_of_code(spec: str, options: Iterable[str] = ()) -> Family:
    """Return the family that FILE.py:NAME or package.module:NAME is, or makes; ValueError where it is none."""
    made = load_object(spec, "model-family")
    words = tuple(options)
    if not isinstance(made, Family) and callable(made):
        made = bound("family_options", spec, made, words)()
    elif words:
        raise ValueError(f"family_options {words[0]} has no effect: {spec} is a Family, and no function")
    if not isinstance(made, Family):
        raise ValueError(f"family {spec} is a {type(made).__name__}: an engines.families.family.Family is needed")
    return made


def own_family(config: Any) -> Family | None:
    """Return the user's family of a transformers config, its fields checked; None where there is none.

    Raises:
        ValueError: a field, or its value, is none that the family handles.
    """
    registered = _OWN.get(config.model_type)
    if registered is None:
        return None
    registered[0].check_config(config)
    return registered[0]


def depends_on(config: Any) -> str | None:
    """Return what the certificate of a config depends on of a user's family; None where there is none."""
    registered = _OWN.get(config.model_type)
    return None if registered is None else registered[1]
