"""The families that are supported; everything else is refused before weights are loaded."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from engines.families.family import Family
from engines.families.gemma3 import GEMMA3
from engines.families.llama import LLAMA
from engines.families.mistral import MISTRAL
from engines.families.qwen2 import QWEN2
from engines.families.qwen3 import QWEN3
from engines.families.qwen3_5 import QWEN3_5
from engines.families.qwen3_5_moe import QWEN3_5_MOE
from engines.families.qwen3_moe import QWEN3_MOE
from engines.families.qwen3_next import QWEN3_NEXT

_NAMES = frozenset(["architectures", "dtype", "torch_dtype", "transformers_version"])
FAMILIES: list[Family] = [
    QWEN3_5, QWEN3_5_MOE, QWEN3_NEXT, QWEN3, QWEN3_MOE, QWEN2, LLAMA, MISTRAL, GEMMA3,
]  # fmt: skip


def register_family(family: Family) -> Family:
    """Add a family; ValueError where one of its model types is taken."""
    for known in FAMILIES:
        for name in {*known.model_types, *known.wrappers}.intersection((*family.model_types, *family.wrappers)):
            raise ValueError(f"model type {name!r} belongs to the family {known.name}")
    FAMILIES.append(family)
    return family


_REASONS = {
    "gpt_oss": "its attention has sinks (s_aux), which packed attention does not compute",
    "granite": "its head divides by logits_scaling",
    "granitemoe": "its head divides by logits_scaling",
    "granitemoehybrid": "it has Mamba layers, and its head divides by logits_scaling",
    "cohere": "its head multiplies by logit_scale",
    "cohere2": "its head multiplies by logit_scale",
    "gemma2": "its attention and its head have soft caps",
    "glm4_moe": "its router has a score-correction buffer that nothing updates",
    "deepseek_v3": "its attention is latent, and its router has a score-correction buffer that nothing updates",
    "mistral3": "it is a vision-language model; its text model alone is mistral",
}


_ADMITTED: dict[str, Family] = {}
"""Families that a proof has admitted in this process, by the digest of their config."""


def admit(config: Any, family: Family) -> Family:
    """Make `family_of` return this family for this very config, unchecked; see `engines.prove.admission`."""
    return _ADMITTED.setdefault(digest(config), family)


def checked_part(config: Any) -> Any:
    """Return what a proof of a config is about: its text config, or the whole of a multi-modal type without a family,
    whose text part is trained inside of it."""
    text = config.get_text_config()
    inside = text is not config and type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return config if inside and registered_family(config) is None else text


@contextmanager
def admitted(config: Any, family: Family) -> Iterator[None]:
    """Admit a family for this very config while this is open: for the proof itself."""
    key = digest(config)
    before = _ADMITTED.get(key)
    _ADMITTED[key] = family
    try:
        yield
    finally:
        if before is None:
            del _ADMITTED[key]


def digest(config: Any) -> str:
    """Return the digest of a config, without names, dtypes and versions."""
    values = _described(config.to_dict())
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _described(values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return {
        name: _described(value)
        for name, value in values.items()
        if not isinstance(name, str) or (name not in _NAMES and not name.startswith("_"))
    }


def registered_family(config: Any) -> Family | None:
    """Return the family that describes a config's model type, unchecked; None where none does."""
    kind = getattr(config, "model_type", None)
    return next((one for one in FAMILIES if kind in (*one.model_types, *one.wrappers)), None)


def family_of(config: Any) -> Family:
    """Return the family of a transformers config, checked field by field, or the one that a proof has admitted.

    Raises:
        ValueError: the type, a field or a value is not supported, and no proof has admitted this config.
    """
    kind = getattr(config, "model_type", None)
    if (family := registered_family(config)) is not None:
        try:
            family.check_config(config)
            return family
        except ValueError:
            if (admitted := _ADMITTED.get(digest(checked_part(config)))) is None:
                raise
            return admitted
    if kind is not None and (admitted := _ADMITTED.get(digest(checked_part(config)))) is not None:
        return admitted
    known = ", ".join(sorted(name for family in FAMILIES for name in (*family.model_types, *family.wrappers)))
    because = f" ({_REASONS[kind]})" if kind in _REASONS else ""
    raise ValueError(
        f"model family {kind!r} is not supported{because}: no test holds its packed log-probs to transformers'. "
        f"Supported are {known}. To add it, write engines/families/{kind}.py (layers, head, attention, auxiliary loss, "
        "float32 parameters, buffers, names on disk), register it in engines/families/registry.py, and add its rows to "
        "engines/proofs/family_cases.py until `python -m engines families` passes (docs/add-a-model-family.md)"
    )
