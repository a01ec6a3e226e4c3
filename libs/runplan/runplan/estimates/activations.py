"""The activations of decoder layers in training, from sizes alone: what autograd or a compiled function keeps.

Stock modules keep the inputs of each operation that needs them for its gradient: a norm its input in float32, what it
divides to and its result, a gate both factors. Functions of `engines.fast` keep the results of matrix products, of
attention and of the delta rule, and make the rest again. Attention is flash attention: no scores are kept. Elements are
of the compute dtype's width (a float32 of bfloat16 layers counts twice).
"""

from typing import Literal

from engines import EngineConfig
from runplan.estimates.logits import is_compiled
from runplan.model.model_shape import ModelShape

Kind = Literal["stock", "fused norms", "compiled"]
"""How layers run: transformers' modules; modules whose norms are one operation each; compiled functions."""


def fsdp_kind(shape: ModelShape, engine: EngineConfig, width: int) -> Kind:
    """Return how layers run under FSDP2: on a CPU norms are operations of seqpack's."""
    if is_compiled(shape, engine, width):
        return "compiled"
    return "fused norms" if engine.device == "cpu" else "stock"


def norm_elements(shape: ModelShape, kind: Kind) -> int:
    """Count the elements a value that a norm keeps: its input and its result, or a stock norm's steps in float32.

    A stock norm whose weights are kept as their distance from 1 (those of hybrids) multiplies in float32 too.
    """
    if kind != "stock":
        return 2
    return 5 if shape.linear_layers else 4


def mixer_elements(shape: ModelShape, linear: bool, tp: int = 1, kind: Kind = "fused norms") -> float:
    """Count the elements a token that attention, or a gated delta net, keeps for its backward pass."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    gate = queries if shape.gated_attention else 0
    if not linear and kind == "compiled":
        return (2 * queries + gate + 2 * keys + 2 * shape.heads) / tp
    if not linear:
        normed = (norm_elements(shape, kind) - 1) * (queries + keys)  # a rotation keeps nothing of what it turns
        return (normed + queries + keys + keys + queries + 2 * gate) / tp
    head, values = shape.linear_head_dim, shape.linear_value_heads * shape.linear_head_dim
    mixed = 2 * shape.linear_key_heads * head + values
    if kind == "compiled":
        return (mixed + 2 * values + shape.linear_value_heads * (64 + 4)) / tp
    # Before and after the convolution; gate; q and k normed and for each value head; chunks of 64 with their state.
    chunked = 2 * values + shape.linear_value_heads * (64 + head * head / 64)
    return (2 * mixed + 3 * values + chunked + 4 * shape.linear_value_heads) / tp


def mlp_elements(shape: ModelShape, tp: int = 1, kind: Kind = "fused norms") -> float:
    """Count the elements a token of an MLP or experts: gate, up, their product; rows of experts twice."""
    if not shape.experts:
        return (2 if kind == "compiled" else 4) * shape.intermediate / tp
    routed = shape.experts_per_token * (4 * shape.expert_intermediate + 2 * shape.hidden)
    return routed + 4 * shape.shared_expert_intermediate / tp + 2 * shape.experts


def layer_elements(shape: ModelShape, linear: bool, tp: int = 1, kind: Kind = "fused norms") -> float:
    """Count the elements a token that a layer keeps: of two norms, and those of its two halves."""
    norms = 2 if kind == "compiled" else 2 * norm_elements(shape, kind)
    return norms * shape.hidden / tp + mixer_elements(shape, linear, tp, kind) + mlp_elements(shape, tp, kind)


def kept_at_head(
    shape: ModelShape,
    layers: int,
    tokens: int,
    recompute: bool,
    width: int,
    tp: int = 1,
    kind: Kind = "fused norms",
) -> float:
    """Return the bytes of `layers` layers at the end of a forward pass."""
    if recompute:
        return width * tokens * layers * shape.hidden / tp
    return width * tokens * sum(_every(shape, tp, kind)) * layers / shape.layers


def activation_bytes(
    shape: ModelShape,
    layers: int,
    tokens: int,
    recompute: bool,
    width: int,
    tp: int = 1,
    kind: Kind = "fused norms",
) -> float:
    """Return the bytes of `layers` layers as a backward pass begins: what they keep, and what one makes again."""
    kept = kept_at_head(shape, layers, tokens, recompute, width, tp, kind)
    if not recompute and kind != "compiled":
        return kept
    return kept + width * tokens * max(_every(shape, tp, "fused norms" if kind == "compiled" else kind))


def _every(shape: ModelShape, tp: int, kind: Kind) -> list[float]:
    linear = [False] * shape.full_attention_layers + [True] * shape.linear_layers
    return [layer_elements(shape, one, tp, kind) for one in linear]
