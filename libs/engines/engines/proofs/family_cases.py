"""The cases that prove each family: tiny models that have every switch of the family in some case."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

VOCABULARY = 48
WINDOW = 5
"""Attention window, shorter than the sequences that are compared."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "attention_dropout": 0.1,
}
_DELTA_NET: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
_SHARED = {"shared_expert_intermediate_size": 16}
_MULTI_AXIS = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    }
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
_LOCAL = {"rope_type": "default", "rope_theta": 1e3}
_MIXED_WINDOWS = {
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "max_window_layers": 2,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
_GEMMA = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}
_GEMMA |= {"query_pre_attn_scalar": 24, "tie_word_embeddings": True}


@dataclass(frozen=True)
class Case:
    """A tiny model: a `model_type` with config values."""

    model_type: str
    switches: str
    """Text of what is special in it, for the table."""
    values: Mapping[str, Any] = field(default_factory=dict)

    def config(self) -> PretrainedConfig:
        """Return its config, with sizes that a laptop computes in milliseconds."""
        return AutoConfig.for_model(self.model_type, **{**_SIZES, **self.values})

    def model(self, seed: int = 0, scale: float = 3.0) -> nn.Module:
        """Return a model in evaluation mode in which no value is as it was initialised.

        Matrices are `scale` times larger, so that a leak shows; vectors and floating-point buffers are changed too.
        """
        torch.manual_seed(seed)
        model: nn.Module = AutoModelForCausalLM.from_config(self.config())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(scale if parameter.ndim >= 2 else 1.0).add_(0.1 * torch.rand_like(parameter))
            for buffer in model.buffers():
                if buffer.is_floating_point():
                    buffer.mul_(1 + 0.05 * torch.rand_like(buffer))
        return model.eval()

    def __str__(self) -> str:
        """Return its name for the table and for tests."""
        return f"{self.model_type}, {self.switches}"


def _yarn(**more: Any) -> dict[str, Any]:
    return {"rope_parameters": {**_YARN, **more}, "attention_bias": True}


CASES: tuple[Case, ...] = (
    Case("qwen3_5_text", "tied, multi-axis rope", {**_DELTA_NET, **_MULTI_AXIS, "tie_word_embeddings": True}),
    Case("qwen3_5_text", "biases, yarn", {**_DELTA_NET, **_yarn(partial_rotary_factor=0.5)}),
    Case("qwen3_5_moe_text", "router's loss, multi-axis rope",
         {**_DELTA_NET, **_EXPERTS, **_SHARED, **_ROUTED, **_MULTI_AXIS}),
    Case("qwen3_5_moe_text", "biases, yarn", {**_DELTA_NET, **_EXPERTS, **_SHARED, **_yarn(partial_rotary_factor=0.5)}),
    Case("qwen3_next", "router's loss", {**_DELTA_NET, **_EXPERTS, **_SHARED, **_ROUTED}),
    Case("qwen3_next", "some layers dense, raw top k, biases, yarn",
         {**_DELTA_NET, **_EXPERTS, **_SHARED, **_ROUTED, **_yarn(partial_rotary_factor=0.5), "mlp_only_layers": [1],
          "norm_topk_prob": False}),
    Case("qwen3_next", "every second layer dense", {**_DELTA_NET, **_EXPERTS, **_SHARED, "decoder_sparse_step": 2}),
    Case("qwen3", "plain"),
    Case("qwen3", "tied, windows, biases, yarn", {**_MIXED_WINDOWS, **_yarn(), "tie_word_embeddings": True}),
    Case("qwen3_moe", "router's loss", {**_EXPERTS, **_ROUTED, "norm_topk_prob": True}),
    Case("qwen3_moe", "window, some layers dense, raw top k, biases, yarn",
         {**_EXPERTS, **_ROUTED, **_yarn(), "use_sliding_window": True, "sliding_window": WINDOW,
          "mlp_only_layers": [1], "norm_topk_prob": False}),
    Case("qwen3_moe", "every second layer dense, tied",
         {**_EXPERTS, **_ROUTED, "decoder_sparse_step": 2, "tie_word_embeddings": True}),
    Case("qwen2", "tied", {"tie_word_embeddings": True}),
    Case("qwen2", "windows, yarn", {**_MIXED_WINDOWS, "rope_parameters": _YARN}),
    Case("llama", "plain"),
    Case("llama", "llama3 rope", {"rope_parameters": _LLAMA3, "pretraining_tp": 2}),
    Case("llama", "tied, biases, linear rope",
         {"rope_parameters": _LINEAR, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    Case("llama", "yarn", {"rope_parameters": _YARN}),
    Case("mistral", "window", {"sliding_window": WINDOW}),
    Case("mistral", "no window, tied, yarn",
         {"sliding_window": None, "tie_word_embeddings": True, "rope_parameters": _YARN}),
    Case("gemma3_text", "windows, tied", _GEMMA),
    Case("gemma3_text", "windows, untied, biases, linear rope",
         {**_GEMMA, "tie_word_embeddings": False, "attention_bias": True,
          "rope_parameters": {"full_attention": _LINEAR, "sliding_attention": _LOCAL}}),
)  # fmt: skip
