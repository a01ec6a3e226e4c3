"""Fields of megatron-core's TransformerConfig that a user sets: checked by name and by type. Those that no test has run
(`engines.capability.RUN_OPTIONS`) are proven for the run (`engines.prove.options`)."""

import dataclasses
import difflib
import re
from collections.abc import Mapping
from importlib.util import find_spec
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron.core.transformer.transformer_config import TransformerConfig

from engines.capability import DEEPEP

REPLACEMENTS: Mapping[str, str] = {
    "max_seqlen_per_dp_cp_rank": "max_tokens_per_rank, the one cap on a rank's tokens",
    "hybrid_context_parallel": "context_parallel='dynamic'",
    "context_parallel_size": "context_parallel='static:N'",
    "recompute_granularity": "gradient_checkpointing",
    "moe_enable_deepep": f"{DEEPEP[0]}=deepep",
}
"""Our settings for fields of megatron-core's."""
OURS = frozenset(
    [
        *("activation_func", "add_bias_linear", "add_qkv_bias", "apply_rope_fusion", "attention_dropout"),
        *("attention_output_gate", "batch_p2p_comm", "bf16", "bias_activation_fusion", "bias_dropout_fusion"),
        *("calculate_per_token_loss", "expert_model_parallel_size", "expert_tensor_parallel_size"),
        *("ffn_hidden_size", "gated_linear_unit", "gradient_accumulation_fusion", "hidden_dropout", "hidden_size"),
        *("kv_channels", "layernorm_epsilon", "masked_softmax_fusion", "moe_ffn_hidden_size", "moe_grouped_gemm"),
        *("glu_linear_offset", "moe_apply_probs_on_input", "moe_router_dtype", "moe_use_legacy_grouped_gemm"),
        *("moe_router_load_balancing_type", "moe_router_pre_softmax", "moe_router_topk", "moe_shared_expert_gate"),
        *("moe_shared_expert_intermediate_size", "moe_token_dispatcher_type", "normalization"),
        *("num_attention_heads", "num_layers", "num_layers_in_first_pipeline_stage"),
        *("num_layers_in_last_pipeline_stage", "num_moe_experts", "num_query_groups", "overlap_p2p_comm"),
        *("params_dtype", "perform_initialization", "persist_layer_norm", "pipeline_dtype"),
        *("pipeline_model_parallel_size", "qk_layernorm", "sequence_parallel", "tensor_model_parallel_size"),
        *("use_cpu_initialization", "variable_seq_lengths", "virtual_pipeline_model_parallel_size"),
    ]
)
"""Fields that follow from the model or from other settings of the engine."""
_UNSEEN = re.compile(
    r"capacity|drop|jitter|window|clip|clamp|limited_devices|fp8|fp4|quant|kitchen|init|bias_update|coeff|mtp_|dsa_|"
    r"scaling_factor|sampling|inference|flash_decode|test_mode|random|force|autocast|bf16"
)
"""Fields that change what a model computes past some size, by chance, in fewer bits, or in a loss: a proof in small and
in float32 could not tell."""

_DISPATCHERS = re.compile(r"deepep|hybridep|ncclep|flex_dispatcher")
"""Fields of dispatchers; but for DeepEP's none of these is used, so that they would have no effect."""


def checked_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, as they go into a TransformerConfig.

    Raises:
        ValueError: there is no such field, it follows from model or settings, no proof can be made of it, or its type
            is wrong.
    """
    types = get_type_hints(TransformerConfig)
    known = [field.name for field in dataclasses.fields(TransformerConfig)]
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            raise ValueError(
                f"transformer_options: megatron-core's TransformerConfig has no field {name}"
                + (f", did you mean {' or '.join(near)}?" if near else "")
            )
        if name in OURS:
            raise ValueError(
                f"transformer_options: {name} follows from the model or from other settings of the engine: leave it out"
            )
        if name in REPLACEMENTS:
            raise ValueError(f"transformer_options: {name} is set by {REPLACEMENTS[name]}: leave it out")
        if _DISPATCHERS.search(name) and (name not in DEEPEP or (name == DEEPEP[0] and value != "deepep")):
            raise ValueError(
                f"transformer_options: {name}={value} is of another dispatcher, tokens go to their experts by "
                f"all-to-all here, or by {DEEPEP[0]}=deepep: leave it out"
            )
        if _UNSEEN.search(name):
            raise ValueError(
                f"transformer_options: {name} changes what the model computes, by sizes, chance, fewer bits or a loss "
                "that no proof in small shows: leave it out"
            )
        if not _takes(types[name], value):
            raise ValueError(f"transformer_options: {name} must be {_described(types[name])}, got {value!r}")
    _check_deepep(given)
    return dict(given)


def _check_deepep(given: Mapping[str, Any]) -> None:
    """Refuse its options without the package, or without one another."""
    backend, *others = DEEPEP
    if backend not in given:
        for name in given.keys() & set(others):
            raise ValueError(f"transformer_options: {name} has no effect without {backend}=deepep: leave it out")
    elif find_spec("deep_ep") is None:
        raise ValueError(
            f"transformer_options: {backend}={given[backend]} needs the package deep_ep, which is not installed: build "
            "it for this machine's GPUs, or leave the option out for the all-to-all"
        )


def _kinds(hint: Any) -> tuple[Any, ...]:
    """Return the alternatives of a type."""
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _takes(hint: Any, value: Any) -> bool:
    """Return whether a value that was read as JSON is of a type."""
    return any(
        value in get_args(kind)
        if get_origin(kind) is Literal
        else isinstance(value, list) and all(_takes(get_args(kind)[0], one) for one in value)
        if get_origin(kind) is list
        else type(value) is kind or (kind is float and type(value) is int) or (kind is NoneType and value is None)
        for kind in _kinds(hint)
    )


def _described(hint: Any) -> str:
    return " or ".join(kind.__name__ if isinstance(kind, type) else str(kind) for kind in _kinds(hint))
