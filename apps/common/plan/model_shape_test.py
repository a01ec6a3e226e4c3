"""Shapes are held to transformers: the parameters of the real module on the meta device, and its default sizes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3Config, Qwen3MoeConfig

from apps.common.plan.model_shape import ModelShape, count_parameters

SMALL = ModelShape("small", "", "", layers=4, hidden=32, heads=4, kv_heads=2, head_dim=8, vocab=64, intermediate=48)


def as_config(shape):
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


def parameters_of_the_module(shape):
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
def test_the_count_is_that_of_the_real_module(hybrid, mixture, tied, pairs, hidden):
    shape = replace(SMALL, layers=2 * pairs, hidden=hidden, tied_embeddings=tied)
    if hybrid:
        shape = replace(shape, linear_head_dim=16, **HYBRID)
    if mixture:
        shared = 24 if hybrid else 0
        experts: dict[str, Any] = {"experts": 4, "experts_per_token": 2, "expert_intermediate": 24}
        shape = replace(shape, intermediate=0, shared_expert_intermediate=shared, **experts)
    assert count_parameters(shape).total == parameters_of_the_module(shape)


def test_the_active_parameters_of_a_dense_model_are_all():
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
def test_sizes_that_make_no_model_are_refused(change, words):
    with pytest.raises(ValueError, match=words):
        replace(SMALL, **change)
