"""Which family a config gets: the registered one, or one that a proof of this config admits."""

from typing import Any, Literal

from engines.families.family import Family
from engines.families.registry import admit, family_of, registered_family
from engines.prove.certificate import Certificate, cached_at
from engines.prove.generic_family import generic_family
from engines.prove.proof import prove

_COMPRESSED = ("quantization_config", "compression_config")
Mode = Literal["off", "cached", "always"]


def admitted_family(config: Any, mode: Mode = "cached", untested: tuple[str, ...] = ()) -> Family:
    """Return the family of a transformers config; one that is not registered is proven first.

    `mode`: "cached" takes the certificate of an earlier proof of this config and these versions, "always" proves anew,
    "off" refuses what is not registered. `untested`: config fields that may be left unexercised by the proof.

    Raises:
        ValueError: the proof failed, or left fields unexercised; the text says what to change.
    """
    try:
        return family_of(config)
    except ValueError:
        if mode == "off":
            raise
    text = config.get_text_config()
    for name in _COMPRESSED:
        if getattr(config, name, None) or getattr(text, name, None):
            raise ValueError(
                f"{config.model_type} has {name}: weights that are not plain numbers can't be trained here"
            )
    certificate = make_certificate(text, mode)
    if not certificate.holds:
        raise ValueError(f"{certificate}{_padded_hint(certificate)}")
    if missing := [name for name in certificate.not_exercised if name not in untested]:
        raise ValueError(
            f"{certificate}. But no length or layer of the proof exercised {', '.join(missing)}, which the modelling "
            f"code reads: accept that by name (allow_untested={','.join(missing)})"
        )
    return admit(text, registered_family(text) or generic_family(text))


def make_certificate(text: Any, mode: Mode = "cached") -> Certificate:
    """Return the certificate of a text config, from the cache where `mode` allows; a new one is cached."""
    path = cached_at(text)
    if mode != "always" and path.is_file():
        return Certificate.load(path)
    certificate = prove(text)
    certificate.save(path)
    return certificate


def _padded_hint(certificate: Certificate) -> str:
    if certificate.padded is not None and certificate.padded <= 1e-5:
        return "; padded rows are equal (set batching='padded')"
    return ""
