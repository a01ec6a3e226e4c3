"""megatron-core's TransformerConfig for a model, a layout and an engine's settings."""

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional

from engines.capability import DEEPEP
from engines.megatron.config.model_sizes import ModelSizes
from engines.megatron.config.transformer_options import OURS, checked_options
from engines.parallel.layout import ParallelLayout
from engines.parallel.stages import StageSizes


def transformer_config(
    sizes: ModelSizes, layout: ParallelLayout, dtype: torch.dtype, stages: StageSizes, options: Mapping[str, Any]
) -> TransformerConfig:
    """Return megatron-core's TransformerConfig; `options` are the user's, ValueError where they cannot be set.

    Sequence parallelism goes with tensor parallelism: megatron-core wants it for experts, and one way is one way to
    prove. Losses are divided by global counts before they come here: `calculate_per_token_loss` keeps Megatron from
    dividing a gradient. Sizes of activations travel with them (`variable_seq_lengths`), as packed rows differ.
    """
    virtual: dict[str, Any] = {}
    if stages.chunks > 1:  # without overlap the messages of one pair of ranks cross
        virtual = {
            "virtual_pipeline_model_parallel_size": stages.chunks,
            "overlap_p2p_comm": True,
            "batch_p2p_comm": False,
        }
    ours: dict[str, Any] = dict(
        num_layers=len(sizes.layer_types),
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.kv_heads,
        kv_channels=sizes.head_dim,
        ffn_hidden_size=sizes.intermediate,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=sizes.eps,
        qk_layernorm=sizes.qk_norm,
        add_qkv_bias=sizes.qkv_bias,
        attention_output_gate=sizes.gated,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        num_layers_in_first_pipeline_stage=stages.first,
        num_layers_in_last_pipeline_stage=stages.last,
        sequence_parallel=layout.tp > 1,
        variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type="flex" if options.get(DEEPEP[0]) == "deepep" else "alltoall",
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **virtual,
        **_experts(sizes, layout),
    )
    assert ours.keys() <= OURS, f"not known as ours: {ours.keys() - OURS}"
    return TransformerConfig(**ours, **checked_options(options))


def _experts(sizes: ModelSizes, layout: ParallelLayout) -> dict[str, Any]:
    experts = sizes.experts
    if experts is None:
        return {}
    out: dict[str, Any] = {
        "num_moe_experts": experts.experts,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.intermediate,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": not experts.normalized,
        "moe_grouped_gemm": False,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
    }
    if experts.shared:
        out |= {"moe_shared_expert_intermediate_size": experts.shared, "moe_shared_expert_gate": sizes.gated}
    return out
