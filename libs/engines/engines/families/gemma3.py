"""Gemma 3, text: windows in five layers of six, a rotary base for each kind, scaled embeddings, a tied head.

Of a vision-language checkpoint the text part is trained, and the tower is carried.
"""

from engines.families.family import ANY, Family
from engines.families.fields import ATTENTION

GEMMA3 = Family(
    name="gemma3",
    model_types=("gemma3_text",),
    wrappers=("gemma3",),
    architecture="Gemma3ForCausalLM",
    attention="Gemma3Attention",
    layer_types=("full_attention", "sliding_attention"),
    rope_types=("default", "linear"),
    fields={
        **ATTENTION,
        "hidden_activation": ANY,
        "query_pre_attn_scalar": ANY,
        "sliding_window": ANY,
        "sliding_window_pattern": ANY,
        "_sliding_window_pattern": ANY,
        "rope_local_base_freq": ANY,
        "attention_bias": (False, True),
        "use_bidirectional_attention": (False,),
        "cache_implementation": ANY,  # of generation
        "final_logit_softcapping": (),
        "attn_logit_softcapping": (),
    },
    carried={"*vision_tower.*": (), "*multi_modal_projector.*": ()},
)
