"""Tiny random models and batches: for the tests, the examples and trying things out on a laptop."""

from typing import Any

import torch
from tensordict import TensorDict
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from seqpack.batches.batch import make_batch

_ROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}

_TOWER = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}
_MEDIA_TOKENS = {"image_token_id": 44, "video_token_id": 45, "vision_start_token_id": 46, "vision_end_token_id": 47}

FUSED_SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "max_position_embeddings": 4096,
}
"""`changes` for sizes that the fused kernels take: one set of them, since kernels are tuned for each."""


def tiny_config(kind: str = "dense", **changes: Any) -> Any:
    """Return a transformers config of a hybrid model: alternating gated delta net and full attention layers.

    `kind`: "dense" (Qwen3.5), "vision" (Qwen3.5 with a vision tower; `changes` are of its text part), "moe"
    (Qwen3.5 MoE), "vision_moe" (that with a tower), "next" (Qwen3-Next), "attention" (Qwen3, no delta net) or
    "attention_moe" (Qwen3 MoE, that with experts).
    """
    shared: dict[str, Any] = {
        "vocab_size": 48,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "intermediate_size": 48,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    hybrid: dict[str, Any] = {
        "full_attention_interval": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    experts["shared_expert_intermediate_size"] = 16
    if kind == "dense":
        return Qwen3_5TextConfig(
            **{"tie_word_embeddings": True, "rope_parameters": _ROPE, **shared, **hybrid, **changes}
        )
    if kind == "vision":
        text = {"tie_word_embeddings": True, "rope_parameters": _ROPE, **shared, **hybrid, **changes}
        return Qwen3_5Config(text_config=text, vision_config=_TOWER, tie_word_embeddings=True, **_MEDIA_TOKENS)
    if kind == "moe":
        return Qwen3_5MoeTextConfig(**{"rope_parameters": _ROPE, **shared, **hybrid, **experts, **changes})
    if kind == "vision_moe":
        text = {"rope_parameters": _ROPE, **shared, **hybrid, **experts, **changes}
        return Qwen3_5MoeConfig(text_config=text, vision_config=_TOWER, tie_word_embeddings=False, **_MEDIA_TOKENS)
    if kind == "next":
        return Qwen3NextConfig(**{**shared, **hybrid, **experts, **changes})
    if kind == "attention":
        return Qwen3Config(**{**shared, **changes})
    if kind == "attention_moe":
        del experts["shared_expert_intermediate_size"]
        return Qwen3MoeConfig(**{**shared, **experts, "norm_topk_prob": True, **changes})
    kinds = ("dense", "vision", "moe", "vision_moe", "next", "attention", "attention_moe")
    raise ValueError(f"kind must be one of {', '.join(map(repr, kinds))}, got {kind!r}")


def tiny_model(kind: str = "dense", seed: int = 0, scale: float = 4.0, **changes: Any) -> nn.Module:
    """Return a random model whose weights are `scale` times the usual, so that a leak would show in its logits."""
    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if kind.startswith("vision") else AutoModelForCausalLM
    model: nn.Module = auto.from_config(tiny_config(kind, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(scale)
    return model


def tiny_batch(lengths: list[int], seed: int = 0, vocab: int = 48) -> TensorDict:
    """Return random sequences of these lengths with every key of the objectives; a third of each is its prompt."""
    rng = torch.Generator().manual_seed(seed)
    samples = []
    for index, length in enumerate(lengths):
        mask = torch.arange(length) >= max(1, length // 3)
        samples.append(
            {
                "input_ids": torch.randint(2, vocab, (length,), generator=rng),
                "loss_mask": mask,
                "advantages": torch.randn(1, generator=rng) * mask,
                "rollout_log_probs": -4 * torch.rand(length, generator=rng) * mask,
                "old_log_probs": -4 * torch.rand(length, generator=rng) * mask,
                "ref_log_probs": -4 * torch.rand(length, generator=rng) * mask,
                "group": index // 2,
            }
        )
    return make_batch(samples)
