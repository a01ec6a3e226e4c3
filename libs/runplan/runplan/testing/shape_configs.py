"""Configs of transformers with a shape's sizes."""

import torch
from transformers import (
    AutoModelForImageTextToText,
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from runplan.model.model_shape import ModelShape, count_parameters, shape_of, tower_parameters


def as_config(shape: ModelShape) -> PretrainedConfig:
    """Return the text model's config."""
    sizes = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied_embeddings,
    }
    hybrid = shape.full_attention_interval > 1
    if hybrid:
        sizes |= {
            "full_attention_interval": shape.full_attention_interval,
            "linear_num_key_heads": shape.linear_key_heads,
            "linear_num_value_heads": shape.linear_value_heads,
            "linear_key_head_dim": shape.linear_head_dim,
            "linear_value_head_dim": shape.linear_head_dim,
            "linear_conv_kernel_dim": shape.linear_conv_width,
        }
    if not shape.experts:
        return (Qwen3_5TextConfig if hybrid else Qwen3Config)(intermediate_size=shape.intermediate, **sizes)
    sizes |= {
        "num_experts": shape.experts,
        "num_experts_per_tok": shape.experts_per_token,
        "moe_intermediate_size": shape.expert_intermediate,
    }
    if not hybrid:
        return Qwen3MoeConfig(**sizes)
    return Qwen3_5MoeTextConfig(shared_expert_intermediate_size=shape.shared_expert_intermediate, **sizes)


def vlm_config(shape: ModelShape) -> PretrainedConfig:
    """Return the config of the checkpoint that holds decoder and tower."""
    tower = shape.vision
    assert tower is not None
    vision = {
        "depth": tower.layers,
        "hidden_size": tower.hidden,
        "intermediate_size": tower.intermediate,
        "num_heads": 4,
        "num_position_embeddings": tower.positions,
        "patch_size": tower.patch,
        "temporal_patch_size": tower.temporal_patch,
        "in_channels": tower.channels,
        "spatial_merge_size": tower.merge,
        "out_hidden_size": shape.hidden,
    }
    maker = Qwen3_5MoeConfig if shape.experts else Qwen3_5Config
    text = as_config(shape).to_dict()
    return maker(text_config=text, vision_config=vision, tie_word_embeddings=shape.tied_embeddings)


def assert_counted(shape: ModelShape) -> None:
    """Compare the counts of decoder and tower with the real module, on the meta device."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(vlm_config(shape))
    assert tower_parameters(shape) == sum(p.numel() for p in model.model.visual.parameters())
    assert count_parameters(shape).total + tower_parameters(shape) == sum(p.numel() for p in model.parameters())
    assert shape_of(vlm_config(shape), shape.name).vision == shape.vision
