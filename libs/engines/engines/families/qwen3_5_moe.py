"""Qwen3.5 with experts (and a shared one); alone, or in a vision-language model."""

from engines.families.family import Family, VisionForm
from engines.families.fields import (
    ATTENTION,
    DELTA_NET,
    EXPERTS,
    MTP_TENSORS,
    MULTI_TOKEN_PREDICTION,
    VISION,
    VISION_TENSORS,
)
from seqpack.adapters.delta_net import split_projections

QWEN3_5_MOE = Family(
    name="qwen3_5_moe",
    model_types=("qwen3_5_moe_text",),
    wrappers=("qwen3_5_moe",),
    vision=VisionForm("Qwen3_5MoeForConditionalGeneration", VISION),
    architecture="Qwen3_5MoeForCausalLM",
    attention="Qwen3_5MoeAttention",
    delta_nets={"Qwen3_5MoeGatedDeltaNet": split_projections},
    layer_types=("full_attention", "linear_attention"),
    rope_types=("default", "yarn"),
    fields={
        **ATTENTION,
        **DELTA_NET,
        **EXPERTS,
        **MULTI_TOKEN_PREDICTION,
        "attention_bias": (False, True),
        "mlp_only_layers": ([],),
        "decoder_sparse_step": (1,),
        "norm_topk_prob": (True,),
    },
    routed=True,
    router="Qwen3_5MoeTopKRouter",
    experts="Qwen3_5MoeExperts",
    float32=("*.linear_attn.A_log", "*.linear_attn.norm.weight"),
    carried={**MTP_TENSORS, **VISION_TENSORS},
    mtp=True,
)
