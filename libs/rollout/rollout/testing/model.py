"""For tests: a tiny hybrid Qwen3.5 made from a configuration, with weights large enough to tell tokens apart."""

from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "full_attention_interval": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "pad_token_id": 0,
    "eos_token_id": 1,
}

_DENSE_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "tie_word_embeddings",
    "pad_token_id",
    "eos_token_id",
)
HYBRID_067B: dict[str, Any] = {
    "vocab_size": 65536,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
"""For benchmarks, that of libs/engines/benchmarks/step_gpu.py."""


def tiny_model(vocab: int = 48, layers: int = 4, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build a model of alternating gated-delta-net and full-attention layers, hidden size 32, float32, eval mode."""
    config = Qwen3_5TextConfig(**_SIZES | {"vocab_size": vocab, "num_hidden_layers": layers} | changes)
    torch.manual_seed(seed)
    return _with_large_weights(Qwen3_5ForCausalLM(config))


def tiny_dense_model(vocab: int = 48, layers: int = 2, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build a Qwen3 of the same size: softmax attention in every layer."""
    sizes = {name: value for name, value in _SIZES.items() if name in _DENSE_SIZES}
    config = Qwen3Config(**sizes | {"vocab_size": vocab, "num_hidden_layers": layers} | changes)
    torch.manual_seed(seed)
    return _with_large_weights(Qwen3ForCausalLM(config))


def tiny_mixture(vocab: int = 48, layers: int = 2, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build a `tiny_model` with six experts in each layer, two of them a token."""
    config = Qwen3_5MoeTextConfig(**_mixture_sizes(vocab, layers, changes))
    torch.manual_seed(seed)
    return _with_large_experts(_with_large_weights(Qwen3_5MoeForCausalLM(config)))


def _mixture_sizes(vocab: int, layers: int, changes: dict[str, Any]) -> dict[str, Any]:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    sizes = {**_SIZES, **experts, "shared_expert_intermediate_size": 32} | changes
    sizes.pop("intermediate_size", None)
    return sizes | {"vocab_size": vocab, "num_hidden_layers": layers}


def _with_large_experts(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name or name.endswith("mlp.gate.weight"):
                parameter.normal_(0, 0.25)
    return model


def tiny_vision_model(vocab: int = 48, layers: int = 4, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build `tiny_model` with a vision tower: patches of 2 x 2 pixels and 2 frames, four of them a token.

    The image token is 44. `changes` are those of its text part.
    """
    return _seeing(_SIZES | {"vocab_size": vocab, "num_hidden_layers": layers} | changes, seed)


def tiny_vision_moe(vocab: int = 48, layers: int = 4, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build `tiny_vision_model` with experts in each layer of its text part, as in `tiny_mixture`."""
    text = _mixture_sizes(vocab, layers, changes)
    return _with_large_experts(_seeing(text, seed, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration))


def _seeing(
    text: dict[str, Any], seed: int, make_config: Any = Qwen3_5Config, make: Any = Qwen3_5ForConditionalGeneration
) -> PreTrainedModel:
    tower = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "patch_size": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16,
    }
    config = make_config(
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=True,
        image_token_id=44,
        video_token_id=45,
        vision_start_token_id=46,
        vision_end_token_id=47,
    )
    torch.manual_seed(seed)
    model = _with_large_weights(make(config))
    with torch.no_grad():
        for parameter in model.model.visual.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def _with_large_weights(model: PreTrainedModel) -> PreTrainedModel:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("proj.weight", "proj_qkv.weight", "embed_tokens.weight")):
                parameter.normal_(0, 0.25)  # the default 0.02 leaves every token about equally likely
    return model.eval()


# Heads of a size that vLLM can compute on a CPU.
SERVED: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
"""Changes to `tiny_model`'s config."""
