"""Sizes of a model's adapters, from its own sizes alone (`engines.adapters.lora` adds them)."""

from collections.abc import Iterator

from engines import LoraConfig
from runplan.model.model_shape import ModelShape

LinearSizes = tuple[str, int, int]
"""The last name of a linear layer, its inputs and outputs."""


def adapter_parameters(shape: ModelShape, lora: LoraConfig) -> int:
    """Count the parameters of all adapters: rank times inputs and outputs of each layer, or expert, that has one."""
    return sum(lora.rank * (i + o) for i, o in (*_adapted(shape, lora), *_stacked(shape, lora)))


def adapted_elements(shape: ModelShape, lora: LoraConfig) -> int:
    """Count the elements of the weights that have adapters."""
    return sum(i * o for i, o in (*_adapted(shape, lora), *_stacked(shape, lora)))


def syncs_adapters(lora: LoraConfig) -> bool:
    """Return whether a weight sync sends adapters alone; with adapters on experts it sends merged weights."""
    return bool(lora.rank) and not lora.target_parameters


def _stacked(shape: ModelShape, lora: LoraConfig) -> Iterator[tuple[int, int]]:
    """Yield inputs and outputs of each expert's matrix that has an adapter."""
    inner = shape.expert_intermediate
    for name, inputs, outputs in (("gate_up_proj", shape.hidden, 2 * inner), ("down_proj", inner, shape.hidden)):
        if any(target.rpartition(".")[2] == name for target in lora.target_parameters):
            yield from [(inputs, outputs)] * (shape.layers * shape.experts)


def _adapted(shape: ModelShape, lora: LoraConfig) -> Iterator[tuple[int, int]]:
    """Yield inputs and outputs of each layer that has an adapter."""
    mixers = shape.full_attention_layers * [*attention_linears(shape)] + shape.linear_layers * [
        *delta_net_linears(shape)
    ]
    for name, inputs, outputs in [*mixers, *(shape.layers * [*mlp_linears(shape)])]:
        if not lora.targets or name in lora.targets:
            yield inputs, outputs


def attention_linears(shape: ModelShape) -> Iterator[LinearSizes]:
    """Yield the linear layers of attention."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "q_proj", shape.hidden, queries * (2 if shape.gated_attention else 1)
    yield "k_proj", shape.hidden, keys
    yield "v_proj", shape.hidden, keys
    yield "o_proj", queries, shape.hidden


def delta_net_linears(shape: ModelShape) -> Iterator[LinearSizes]:
    """Yield the linear layers of a gated delta net."""
    keys, values = (n * shape.linear_head_dim for n in (shape.linear_key_heads, shape.linear_value_heads))
    yield "in_proj_qkv", shape.hidden, 2 * keys + values
    yield "in_proj_z", shape.hidden, values
    yield "in_proj_b", shape.hidden, shape.linear_value_heads
    yield "in_proj_a", shape.hidden, shape.linear_value_heads
    yield "out_proj", values, shape.hidden


def mlp_linears(shape: ModelShape) -> Iterator[LinearSizes]:
    """Yield the layers of a dense MLP; of one with experts only the gate of the shared expert."""
    if not shape.experts:
        yield "gate_proj", shape.hidden, shape.intermediate
        yield "up_proj", shape.hidden, shape.intermediate
        yield "down_proj", shape.intermediate, shape.hidden
    elif shape.shared_expert_intermediate:
        yield "shared_expert_gate", shape.hidden, 1
