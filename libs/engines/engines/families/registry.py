"""The families that are supported; everything else is refused before weights are loaded."""

from typing import Any

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


def family_of(config: Any) -> Family:
    """Return the family of a transformers config, checked field by field; ValueError for what is not supported."""
    kind = getattr(config, "model_type", None)
    for family in FAMILIES:
        if kind in (*family.model_types, *family.wrappers):
            family.check_config(config)
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in (*family.model_types, *family.wrappers)))
    because = f" ({_REASONS[kind]})" if kind in _REASONS else ""
    raise ValueError(
        f"model family {kind!r} is not supported{because}: no test holds its packed log-probs to transformers'. "
        f"Supported are {known}. To add it, write engines/families/{kind}.py (layers, head, attention, auxiliary loss, "
        "float32 parameters, buffers, names on disk), register it in engines/families/registry.py, and add its rows to "
        "engines/proofs/family_cases.py until `python -m engines families` passes (docs/add-a-model-family.md)"
    )
