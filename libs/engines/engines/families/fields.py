"""Config fields that several families share, each with the values that are handled."""

from collections.abc import Mapping
from typing import Any

from engines.families.family import ANY

Fields = Mapping[str, tuple[Any, ...] | None]


def any_value(names: str) -> Fields:
    """Return these fields (separated by blanks), each with every value allowed."""
    return dict.fromkeys(names.split(), ANY)


# Sizes, and what the stock code alone honours. Dropout is never applied: executors keep the model in evaluation mode,
# so that the policy that is trained is the one that was scored. The rope_* fields are older spellings, which
# transformers has read into `rope_parameters`.
ATTENTION = any_value(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings hidden_act initializer_range rms_norm_eps use_cache tie_word_embeddings "
    "pad_token_id bos_token_id eos_token_id attention_dropout rope_theta rope_scaling partial_rotary_factor"
)
WINDOWS = any_value("use_sliding_window sliding_window max_window_layers")
EXPERTS = any_value(
    "num_experts num_local_experts num_experts_per_tok moe_intermediate_size output_router_logits router_aux_loss_coef "
    "mlp_only_layers decoder_sparse_step norm_topk_prob shared_expert_intermediate_size"
)
DELTA_NET: Fields = {
    **any_value(
        "linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads linear_num_value_heads "
        "full_attention_interval"
    ),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish",),
    "mamba_ssm_dtype": ("float32",),
}
# A head that predicts further tokens: carried, or trained where a run asks for it (`engines.mtp`).
MULTI_TOKEN_PREDICTION = any_value("mtp_num_hidden_layers num_mtp_layers mtp_use_dedicated_embeddings mtp_layer_types")
MTP_TENSORS = {"mtp.*": tuple(MULTI_TOKEN_PREDICTION)}
# Sizes of the vision tower that the stock code alone honours. `deepstack_visual_indexes` names layers whose features
# enter the decoder besides, in other families.
VISION: Fields = {
    **any_value(
        "depth hidden_size hidden_act intermediate_size num_heads in_channels patch_size spatial_merge_size "
        "temporal_patch_size out_hidden_size num_position_embeddings initializer_range rope_parameters"
    ),
    "deepstack_visual_indexes": ([],),
}
VISION_TENSORS: Mapping[str, tuple[str, ...]] = {"model.visual.*": ()}
OLD_ROPE_TENSORS: Mapping[str, tuple[str, ...]] = {"*.rotary_emb.inv_freq": ()}
