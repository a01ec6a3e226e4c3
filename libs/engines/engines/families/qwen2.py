"""Qwen2 and Qwen2.5: biases in attention, windows in some layers."""

from engines.families.family import Family
from engines.families.fields import ATTENTION, WINDOWS

QWEN2 = Family(
    name="qwen2",
    model_types=("qwen2",),
    architecture="Qwen2ForCausalLM",
    attention="Qwen2Attention",
    layer_types=("full_attention", "sliding_attention"),
    rope_types=("default", "yarn"),
    fields={**ATTENTION, **WINDOWS, "use_mrope": (False,)},
)
