"""Which family a config gets: the registered one, or one that a proof of this config admits."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, Literal

from engines.families.family import Family
from engines.families.registry import admit, checked_part, family_of, registered_family
from engines.prove.certificate import Certificate, cached_at
from engines.prove.generic_family import generic_family
from engines.prove.proof import prove

_COMPRESSED = ("quantization_config", "compression_config")
Mode = Literal["off", "cached", "always", "full"]
_MADE: set[Path] = set()
"""Certificates that this process has made."""


def admitted_family(
    config: Any, mode: Mode = "cached", untested: tuple[str, ...] = (), batching: str = "packed"
) -> Family:
    """Return the family of a transformers config; one that is not registered is proven first.

    `mode`: "cached" takes the certificate of an earlier proof of this config and these versions, "always" proves anew,
    "full" is "cached" in small, "off" refuses what is not registered. `untested`: config fields that may be left
    unexercised by the proof.

    Raises:
        ValueError: the proof failed, or left fields unexercised; the text says what to change.
    """
    try:
        return family_of(config)
    except ValueError:
        if mode == "off":
            raise
    refuse_compressed(config)
    part = checked_part(config)
    certificate = make_certificate(part, mode)
    if not certificate.admits(batching):
        raise ValueError(f"{certificate}{batching_hint(certificate, batching)}")
    if missing := [name for name in certificate.not_exercised if name not in untested]:
        raise ValueError(
            f"{certificate}. But no length or layer of the proof exercised {', '.join(missing)}, which the modelling "
            f"code reads: accept that by name (allow_untested={','.join(missing)}; in the apps --allow-untested)"
        )
    family = registered_family(part) or generic_family(part)
    return admit(part, family if certificate.holds else replace(family, packs=False))


def refuse_compressed(config: Any) -> None:
    """Raise ValueError for a config whose checkpoint holds quantized or compressed weights."""
    for name in _COMPRESSED:
        if getattr(config, name, None) or getattr(config.get_text_config(), name, None):
            raise ValueError(
                f"{config.model_type} has {name}: weights that are not plain numbers can't be trained here"
            )


def needs_proof(config: Any) -> bool:
    """Return whether no registered family describes a transformers config, field by field."""
    family = registered_family(config)
    if family is None:
        return True
    try:
        family.check_config(config)
    except ValueError:
        return True
    return False


def make_certificate(config: Any, mode: Mode = "cached") -> Certificate:
    """Return the certificate of a config, as `keep_certificate`."""
    return keep_certificate(cached_at(config), mode, lambda: prove(config))


def keep_certificate(path: Path, mode: Mode, make: Callable[[], Certificate]) -> Certificate:
    """Return the certificate that is kept at `path` where `mode` allows; what is made is kept there.

    Processes that ask at the same time make one between them. With "always" the process that starts a run makes it
    anew, once; ranks that it starts take that one.
    """
    with _alone(path):
        taken = mode != "always" or path in _MADE or parent_process() is not None
        if taken and path.is_file():
            return Certificate.load(path)
        certificate = make()
        certificate.save(path)
        _MADE.add(path)
    return certificate


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes of this machine from making the same certificate."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_suffix(".lock").open("w")
    except OSError as error:
        raise ValueError(
            f"certificates can't be kept in {path.parent} ({error.strerror}): name another folder by "
            "TESSERA_CERTIFICATES"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def batching_hint(certificate: Certificate, batching: str) -> str:
    """Return what to change where rows of this batching are not equal, and those of the other one are."""
    other = "packed" if batching == "padded" else "padded"
    if not certificate.admits(other):
        return ""
    return f"; {batching} rows differ, {other} rows are equal (--trainer.batching {other})"
