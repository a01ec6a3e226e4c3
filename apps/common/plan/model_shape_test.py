"""Shapes are held to transformers: the parameters of the real module on the meta device, and its default sizes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from apps.common.plan.model_shape import ModelShape, VisionTower, count_parameters, shape_of, tower_parameters
from apps.grpo.recipes.qwen3_5_27b_fsdp2 import QWEN3_5_27B
from apps.grpo.recipes.qwen3_5_35b_a3b_megatron import QWEN3_5_35B_A3B
from apps.grpo.recipes.qwen3_5_122b_a10b_megatron import QWEN3_5_122B_A10B
from apps.sft.recipes.qwen3_5_397b_a17b_megatron import QWEN3_5_397B_A17B

SMALL = ModelShape("small", "", "", layers=4, hidden=32, heads=4, kv_heads=2, head_dim=8, vocab=64, intermediate=48)


def as_config(shape: ModelShape) -> PretrainedConfig:
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


def parameters_of_the_module(shape: ModelShape) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(as_config(shape))
    return sum(parameter.numel() for parameter in model.parameters())


HYBRID: dict[str, Any] = {
    "gated_attention": True,
    "full_attention_interval": 2,
    "linear_key_heads": 2,
    "linear_value_heads": 4,
}


@settings(max_examples=12, deadline=None)
@given(st.booleans(), st.booleans(), st.booleans(), st.integers(1, 3), st.sampled_from([16, 32, 48]))
def test_the_count_is_that_of_the_real_module(hybrid: bool, mixture: bool, tied: bool, pairs: int, hidden: int) -> None:
    shape = replace(SMALL, layers=2 * pairs, hidden=hidden, tied_embeddings=tied)
    if hybrid:
        shape = replace(shape, linear_head_dim=16, **HYBRID)
    if mixture:
        shared = 24 if hybrid else 0
        experts: dict[str, Any] = {"experts": 4, "experts_per_token": 2, "expert_intermediate": 24}
        shape = replace(shape, intermediate=0, shared_expert_intermediate=shared, **experts)
    assert count_parameters(shape).total == parameters_of_the_module(shape)


def seeing_config(shape: ModelShape) -> PretrainedConfig:
    """Of the checkpoint that holds decoder and tower."""
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


SEEING = replace(
    SMALL,
    linear_head_dim=16,
    vision=VisionTower(layers=2, hidden=16, intermediate=20, positions=9, patch=4, channels=1, merge=3),
    **HYBRID,
)


@pytest.mark.parametrize(
    "shape",
    [SEEING, QWEN3_5_27B, QWEN3_5_35B_A3B, QWEN3_5_122B_A10B, QWEN3_5_397B_A17B],
    ids=lambda shape: shape.name,
)
def test_a_tower_and_its_decoder_are_counted_as_in_the_real_module(shape: ModelShape) -> None:
    """Of full size, on the meta device."""
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(seeing_config(shape))
    assert tower_parameters(shape) == sum(p.numel() for p in model.model.visual.parameters())
    assert count_parameters(shape).total + tower_parameters(shape) == sum(p.numel() for p in model.parameters())
    assert shape_of(seeing_config(shape), shape.name).vision == shape.vision
    assert tower_parameters(replace(shape, vision=None)) == 0


def test_the_towers_default_sizes_are_those_of_transformers() -> None:
    assert shape_of(Qwen3_5Config(), "default").vision == VisionTower()


def test_the_active_parameters_of_a_dense_model_are_all() -> None:
    count = count_parameters(SMALL)
    assert count.active == count.total


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layers": 0}, "at least 1"),
        ({"kv_heads": 3}, "multiple"),
        ({"intermediate": 0}, "either experts"),
        ({"experts": 4}, "go together"),
        ({"full_attention_interval": 4}, "linear_key_heads"),
        ({"vocab": -1}, "negative"),
    ],
)
def test_sizes_that_make_no_model_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match="patch of a vision tower must be at least 1, got 0"):
        VisionTower(patch=0)
    with pytest.raises(ValueError, match=words):
        replace(SMALL, **change)
