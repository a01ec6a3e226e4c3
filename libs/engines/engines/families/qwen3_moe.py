"""Qwen3 with experts."""

from engines.families.family import Family
from engines.families.fields import ATTENTION, EXPERTS, WINDOWS

QWEN3_MOE = Family(
    name="qwen3_moe",
    model_types=("qwen3_moe",),
    architecture="Qwen3MoeForCausalLM",
    attention="Qwen3MoeAttention",
    rope_types=("default", "yarn"),
    fields={**ATTENTION, **EXPERTS, **WINDOWS, "attention_bias": (False, True)},
    routed=True,
    router="Qwen3MoeTopKRouter",
    experts="Qwen3MoeExperts",
)
