"""Qwen3-Next: gated delta nets with joint projections, gated attention, experts and a shared one."""

from engines.families.family import Family
from engines.families.fields import ATTENTION, DELTA_NET, EXPERTS, MTP_TENSORS, MULTI_TOKEN_PREDICTION
from seqpack.adapters.delta_net import joint_projections

QWEN3_NEXT = Family(
    name="qwen3_next",
    model_types=("qwen3_next",),
    architecture="Qwen3NextForCausalLM",
    attention="Qwen3NextAttention",
    delta_nets={"Qwen3NextGatedDeltaNet": joint_projections},
    layer_types=("full_attention", "linear_attention"),
    rope_types=("default", "yarn"),
    fields={
        **ATTENTION,
        **DELTA_NET,
        **EXPERTS,
        **MULTI_TOKEN_PREDICTION,
        "attention_bias": (False, True),
        "use_sliding_window": (False,),
    },
    routed=True,
    router="Qwen3NextTopKRouter",
    experts="Qwen3NextExperts",
    float32=("*.linear_attn.A_log", "*.linear_attn.norm.weight"),
    carried=MTP_TENSORS,
)
