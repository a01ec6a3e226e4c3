"""Sizes of a model's adapters, from its own sizes alone (`engines.adapters.lora` adds them)."""

from collections.abc import Iterator

from engines import LoraConfig
from runplan.model.model_shape import ModelShape

Sizes = tuple[str, int, int]
"""The last name of a linear layer, its inputs and outputs."""


def adapter_parameters(shape: ModelShape, lora: LoraConfig) -> int:
    """Count the parameters of all adapters: rank times inputs and outputs of each layer that has one."""
    mixers = shape.full_attention_layers * [*_attention(shape)] + shape.linear_layers * [*_delta_net(shape)]
    layers = [*mixers, *(shape.layers * [*_mlp(shape)])]
    return sum(lora.rank * (i + o) for name, i, o in layers if not lora.targets or name in lora.targets)


def _attention(shape: ModelShape) -> Iterator[Sizes]:
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "q_proj", shape.hidden, queries * (2 if shape.gated_attention else 1)
    yield "k_proj", shape.hidden, keys
    yield "v_proj", shape.hidden, keys
    yield "o_proj", queries, shape.hidden


def _delta_net(shape: ModelShape) -> Iterator[Sizes]:
    keys, values = (n * shape.linear_head_dim for n in (shape.linear_key_heads, shape.linear_value_heads))
    yield "in_proj_qkv", shape.hidden, 2 * keys + values
    yield "in_proj_z", shape.hidden, values
    yield "in_proj_b", shape.hidden, shape.linear_value_heads
    yield "in_proj_a", shape.hidden, shape.linear_value_heads
    yield "out_proj", values, shape.hidden


def _mlp(shape: ModelShape) -> Iterator[Sizes]:
    """Yield the layers of a dense MLP; of one with experts only the gate of the shared expert."""
    if not shape.experts:
        yield "gate_proj", shape.hidden, shape.intermediate
        yield "up_proj", shape.hidden, shape.intermediate
        yield "down_proj", shape.intermediate, shape.hidden
    elif shape.shared_expert_intermediate:
        yield "shared_expert_gate", shape.hidden, 1
