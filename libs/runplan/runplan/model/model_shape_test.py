"""Shapes are held to transformers: the parameters of the real module on the meta device, and its default sizes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen3_5Config

from runplan.model.model_shape import (
    ModelShape,
    VisionTower,
    count_parameters,
    head_parameters,
    shape_of,
    tower_parameters,
)
from runplan.testing.shape_configs import as_config, assert_counted

SMALL = ModelShape("small", "", "", layers=4, hidden=32, heads=4, kv_heads=2, head_dim=8, vocab=64, intermediate=48)


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


@pytest.mark.parametrize("kinds", ["ddd", "adda", "daaa", "dada", "d", "ddad"])
def test_any_pattern_of_layers_is_counted(kinds: str) -> None:
    names = {"a": "full_attention", "d": "linear_attention"}
    layer_types, size = [names[kind] for kind in kinds], replace(SMALL, layers=len(kinds))
    config = as_config(replace(size, **HYBRID | {"attention_layers": 0}))
    config.layer_types = layer_types
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(config, "drawn")
    assert (shape.full_attention_layers, shape.linear_layers) == (kinds.count("a"), kinds.count("d"))
    assert count_parameters(shape).total == sum(parameter.numel() for parameter in model.parameters())
    assert head_parameters(shape).total == head_parameters(replace(shape, attention_layers=None)).total


VISION_SHAPE = replace(
    SMALL,
    linear_head_dim=16,
    vision=VisionTower(layers=2, hidden=16, intermediate=20, positions=9, patch=4, channels=1, merge=3),
    **HYBRID,
)


def test_a_tower_and_its_decoder_are_counted_as_in_the_real_module() -> None:
    """Of a small shape; those of the recipes are the apps' test."""
    assert_counted(VISION_SHAPE)
    assert tower_parameters(replace(VISION_SHAPE, vision=None)) == 0


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
