"""Qwen3.5, dense: alternating gated delta nets and gated attention; alone, or in a vision-language model."""

from engines.families.family import Family, VisionForm
from engines.families.fields import (
    ATTENTION,
    DELTA_NET,
    MTP_TENSORS,
    MULTI_TOKEN_PREDICTION,
    VISION,
    VISION_TENSORS,
)
from seqpack.adapters.delta_net import split_projections

QWEN3_5 = Family(
    name="qwen3_5",
    model_types=("qwen3_5_text",),
    wrappers=("qwen3_5",),
    vision=VisionForm("Qwen3_5ForConditionalGeneration", VISION),
    architecture="Qwen3_5ForCausalLM",
    attention="Qwen3_5Attention",
    delta_nets={"Qwen3_5GatedDeltaNet": split_projections},
    layer_types=("full_attention", "linear_attention"),
    rope_types=("default", "yarn"),
    fields={
        **ATTENTION,
        **DELTA_NET,
        **MULTI_TOKEN_PREDICTION,
        "attention_bias": (False, True),
        "mlp_only_layers": ([],),
    },
    float32=("*.linear_attn.A_log", "*.linear_attn.norm.weight"),
    carried={**MTP_TENSORS, **VISION_TENSORS},
    mtp=True,
)
