"""The head's memory: which head a run has, and how many logits are there at a time."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines import EngineConfig, LoraConfig
from engines.capability import Supported
from engines.fast.fused_log_probs import KEPT_BYTES
from engines.loading import DTYPES
from engines.megatron.gpu import fused_layers as layers
from engines.tiny import tiny_config
from runplan.estimates.logits import (
    compiled_head,
    fsdp_head,
    has_fused_head,
    is_compiled,
    megatron_head,
    plain_head,
)
from runplan.model.model_shape import ModelShape, shape_of

DENSE = shape_of(tiny_config("dense", linear_key_head_dim=128, linear_value_head_dim=128), "dense")


@pytest.mark.parametrize(
    ("shape", "settings", "width", "answer"),
    [
        (DENSE, {}, 2, True),
        (DENSE, {"dtype": "float32"}, 4, False),
        (DENSE, {"device": "npu"}, 2, False),
        (DENSE, {"compile": "off"}, 2, False),
        (DENSE, {"batching": "padded"}, 2, False),
        (DENSE, {"context_parallel": "dynamic"}, 2, False),
        (DENSE, {"lora": LoraConfig(rank=4)}, 2, True),
        (shape_of(tiny_config("moe", linear_key_head_dim=128, linear_value_head_dim=128), "moe"), {}, 2, False),
        (shape_of(tiny_config("attention"), "attention"), {}, 2, True),
        (replace(shape_of(tiny_config("attention"), "attention"), model_type="llama"), {}, 2, False),
        (shape_of(tiny_config("dense"), "dense"), {}, 2, False),
    ],
)
def test_what_is_compiled(shape: ModelShape, settings: dict[str, Any], width: int, answer: bool) -> None:
    """As `engines.fast.support` decides on a Hopper that has the packages."""
    assert is_compiled(shape, EngineConfig(**{"device": "cuda", **settings}), width) is answer


@pytest.mark.parametrize("kind", ["dense", "moe", "attention"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"context_parallel": "dynamic"},
        {"dtype": "float32"},
        {"compile": "off"},
        {"device": "cpu"},
        {"vision": "frozen"},
        {"lora": LoraConfig(rank=4)},
    ],
    ids=str,
)
def test_a_megatron_stage_has_a_compiled_head_where_its_pieces_are_fused(
    monkeypatch: pytest.MonkeyPatch, kind: str, settings: dict[str, Any]
) -> None:
    """What the backend itself decides, on a machine with Triton; tensor-parallel ranks share the vocabulary."""
    monkeypatch.setattr(layers, "find_spec", lambda name: name)
    config = EngineConfig(**{"backend": "megatron", "device": "cuda", "dtype": "bfloat16", **settings})
    device, dtype = torch.device(config.device), DTYPES[config.dtype]
    fused = isinstance(layers.fused_pieces(config, tiny_config(kind), device, dtype), Supported)
    assert fused is (kind == "dense" and settings in ({}, {"context_parallel": "dynamic"}))
    shape = shape_of(tiny_config(kind), kind)
    assert has_fused_head(shape, config, dtype.itemsize, 1) is fused
    assert not has_fused_head(shape, config, dtype.itemsize, 2)


@given(st.integers(1, 10**6), st.integers(1, 8192))
def test_a_compiled_head_takes_less_and_is_bounded(trained: int, chunk: int) -> None:
    head = DENSE.vocab * DENSE.hidden * 6
    compiled = compiled_head(DENSE, trained, chunk, 2)
    assert compiled.bytes <= max(KEPT_BYTES, chunk * DENSE.vocab * 2) + head
    assert compiled.logits == compiled.rows * DENSE.vocab * 2
    if trained <= chunk:
        assert compiled.bytes < plain_head(DENSE, trained, 2).bytes


@given(st.integers(1, 10**5), st.integers(1, 8192), st.sampled_from([1, 2, 4]))
def test_logits_are_of_a_chunk_at_a_time(trained: int, chunk: int, tp: int) -> None:
    """18 bytes of each in bfloat16; ranks that share the vocabulary have their part of it."""
    config = EngineConfig(device="cuda", compile="off", logit_chunk=chunk)
    rows = min(trained, chunk)
    head = megatron_head(DENSE, config, trained, 2, tp)
    assert head.rows == rows
    assert head.logits == rows * DENSE.vocab * 18 / tp
    assert head.gradients == DENSE.vocab * DENSE.hidden * 6 / tp
    if tp == 1:
        assert fsdp_head(DENSE, config, trained, 2) == head
