"""Mistral 7B and what shares its architecture: a window in every layer, or in none."""

from engines.families.family import ANY, Family
from engines.families.fields import ATTENTION, OLD_ROPE_TENSORS

MISTRAL = Family(
    name="mistral",
    model_types=("mistral",),
    architecture="MistralForCausalLM",
    attention="MistralAttention",
    rope_types=("default", "yarn"),
    fields={**ATTENTION, "sliding_window": ANY},
    carried=OLD_ROPE_TENSORS,
)
