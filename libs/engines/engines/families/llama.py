"""Llama 2, 3 and what shares their architecture."""

from engines.families.family import ANY, Family
from engines.families.fields import ATTENTION, OLD_ROPE_TENSORS

LLAMA = Family(
    name="llama",
    model_types=("llama",),
    architecture="LlamaForCausalLM",
    attention="LlamaAttention",
    rope_types=("default", "linear", "llama3", "yarn"),
    # pretraining_tp: transformers reads it no more.
    fields={**ATTENTION, "attention_bias": (False, True), "mlp_bias": (False, True), "pretraining_tp": ANY},
    carried=OLD_ROPE_TENSORS,
)
