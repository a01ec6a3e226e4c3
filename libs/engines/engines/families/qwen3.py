"""Qwen3, dense: attention with normalised queries and keys, windows in some layers."""

from engines.families.family import Family
from engines.families.fields import ATTENTION, WINDOWS

QWEN3 = Family(
    name="qwen3",
    model_types=("qwen3",),
    architecture="Qwen3ForCausalLM",
    attention="Qwen3Attention",
    layer_types=("full_attention", "sliding_attention"),
    rope_types=("default", "yarn"),
    fields={**ATTENTION, **WINDOWS, "attention_bias": (False, True)},
)
