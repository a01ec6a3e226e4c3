"""Limits of vLLM on a CPU, from a model's config, before anything is loaded. Seen with vLLM 0.32."""

from collections.abc import Mapping
from typing import Any

HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions of full attention; others fail at the first request. A test compares them with vLLM's own list."""
DELTA_NET_DIMS = (64, 128)
"""Head dimensions of a gated delta net."""
HALVES = ("bfloat16", "float16", "half")
"""Names of dtypes of 16 bits that vLLM keeps keys and values in."""
HYBRIDS = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
"""Model types with gated delta nets in some layers."""


def refusal(config: Mapping[str, Any], dtype: str) -> str | None:
    """Return why a CPU can't sample from a model of this config (its text part) in this dtype; None where it can."""
    hybrid = config.get("model_type") in HYBRIDS
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if head_dim not in HEAD_DIMS:
        return (
            f"head_dim {head_dim} of its attention: on a CPU vLLM attends over heads of "
            f"{', '.join(map(str, HEAD_DIMS))}; another would fail at the first request"
        )
    if not hybrid:
        return None
    for name in ("linear_key_head_dim", "linear_value_head_dim"):
        if config[name] not in DELTA_NET_DIMS:
            return f"{name} {config[name]}: on a CPU vLLM's delta nets have heads of 64 or 128"
    if dtype != "bfloat16":
        return f"dtype {dtype}: on a CPU vLLM computes delta nets in bfloat16 alone (VllmConfig.dtype)"
    return None


def arguments_refusal(arguments: Mapping[str, Any], dtype: str) -> str | None:
    """Return why a CPU computes wrong numbers by these engine arguments; None where nothing is known of it."""
    if arguments.get("speculative_config"):
        return (
            "speculative_config: on a CPU vLLM tells log-probs of 0, NaN or -log(vocabulary) of the tokens after "
            "drafts that it took, and does not take the state of delta nets back after others (log-probs 4 off on "
            "average): leave it out"
        )
    cache = arguments.get("kv_cache_dtype")
    if dtype == "float32" and cache in HALVES:
        return (
            f"kv_cache_dtype {cache} beside dtype float32: on a CPU vLLM reads it as float32 (log-probs 0.6 off on "
            "average): leave it out"
        )
    return None


def prompt_refusal(config: Mapping[str, Any], length: int) -> str | None:
    """Return why a CPU can't read a prompt of so many tokens alone; None where it can."""
    if length == 1 and config.get("model_type") in HYBRIDS:
        return "a prompt of one token ends vLLM's process on a CPU, as its convolution refuses it: give two or more"
    return None


def chosen_dtype(config: Mapping[str, Any], requested: str) -> str:
    """Return the dtype that "auto" stands for: a hybrid's is bfloat16, else vLLM takes the model's own."""
    return "bfloat16" if requested == "auto" and config.get("model_type") in HYBRIDS else requested
