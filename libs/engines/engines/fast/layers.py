"""Decoder layers of one model that run as functions under autograd: mixer and MLP, or experts; with adapters or not.

`use_layer_functions(model)` gives each decoder layer instance a subclass of its class, whose forward differs for calls
that carry a `PackedContext` alone; hooks of FSDP and recomputation stay outside. The adaptation of
`scoring.packed_model` stays as it was for everything else. The plain reference is the same model without it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from engines.families.registry import family_of
from engines.fast.adapted_linear import Adapted, Weight, base, of_adapters_alone
from engines.fast.blocks import (
    AttentionWeights,
    DeltaNetWeights,
    MLPWeights,
    SharedExpertWeights,
    Where,
    attention,
    attention_grad,
    delta_net,
    delta_net_grad,
    mlp,
    mlp_grad,
    shared_expert,
    shared_expert_grad,
)
from engines.fast.compiling import MIN_TOKENS, compiled, mark_tokens
from engines.fast.delta_rule import has_delta_nets, prepare_delta_rule
from engines.fast.final_norm import normed, undo_final_norm, use_final_norm
from engines.fast.pointwise import Norm
from engines.fast.routed_layers import is_routed, routed_sum, undo_routed_functions, use_routed_functions
from engines.fast.sequence_bounds import Sequences
from seqpack.adapters.context import CONTEXT_KEY, PackedContext
from seqpack.adapters.subclasses import remove_mixin, set_mixin

ZERO_CENTERED = ("qwen3_5", "qwen3_5_moe")
"""Families whose norms add 1 to their weights."""


class Block(NamedTuple):
    """A function and its gradient (`engines.fast.blocks`), as they are, and as they are called.

    `adapted`: where all weights are frozen, the places in `kind` of those with an adapter; else None.
    """

    kind: type
    norm: Norm
    adapted: tuple[int, ...] | None
    forward: Callable[..., Any]
    gradient: Callable[..., Any]
    plain: tuple[Callable[..., Any], Callable[..., Any]]


@dataclass(frozen=True)
class LayerFunctions:
    """The changes of `use_layer_functions`: the classes of these layers and of a norm. `undo()` restores them."""

    layers: tuple[nn.Module, ...]
    norm: nn.Module

    def undo(self) -> None:
        """Restore the layers; a second call does nothing."""
        for layer in self.layers:
            remove_mixin(layer, FunctionLayer)
            vars(layer).pop("functions", None)
            undo_routed_functions(layer)
        undo_final_norm(self.norm)


def use_layer_functions(model: Any, backend: str | None = "inductor") -> LayerFunctions:
    """Make the decoder layers of a Qwen3.5 or Qwen3 model, adapted for packing, run as functions on packed calls.

    `backend`: torch.compile's, None to run them uncompiled. `engines.fast.support` decides before whether the model
    can.
    """
    family = family_of(model.config)
    layers = tuple(family.layers(model))
    text = model.config.get_text_config()
    names = {id(mixer): name for name, mixer in model.named_modules()}
    norm = Norm(float(text.rms_norm_eps), zero_centered=family.name in ZERO_CENTERED)
    for layer in layers:
        mixer = next(iter(family.mixers(layer)))[0]
        set_mixin(layer, FunctionLayer)
        if is_routed(layer):
            use_routed_functions(layer)
        vars(layer)["functions"] = _Functions(names[id(mixer)], text, norm, backend)
    last = family.decoder(model).norm
    use_final_norm(last, norm, backend)
    return LayerFunctions(layers, last)


def sequences_of(context: PackedContext, text: Any) -> Sequences:
    """Return the boundaries of a context in every form, made at the first call; `text`: the model's text config."""
    sequences: Sequences | None = context.derived.get("sequences")
    if sequences is None:
        edges = context.edges if context.edges is not None else tuple(context.cu_seqlens.tolist())
        sequences = context.derived["sequences"] = Sequences.of(context.cu_seqlens, edges, context.positions)
        if has_delta_nets(text):
            prepare_delta_rule(sequences.boundaries, edges, text.linear_num_value_heads)
    return sequences


class FunctionLayer(nn.Module):
    """The class of a decoder layer that runs as functions, before its stock class."""

    functions: "_Functions"

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the functions on a packed call, the stock forward on any other."""
        context: PackedContext | None = kwargs.get(CONTEXT_KEY)
        if context is None:
            return super().forward(hidden_states, *args, **kwargs)
        context.mixed.append(self.functions.name)
        return self.functions.run(self, hidden_states.squeeze(0), kwargs["position_embeddings"], context).unsqueeze(0)


class _Functions:
    """The functions of one decoder layer."""

    def __init__(self, name: str, text: Any, norm: Norm, backend: str | None) -> None:
        self.name = name
        self.text = text
        self.norm = norm
        self.backend = backend

    def run(self, layer: Any, x: Tensor, angles: tuple[Tensor, Tensor], context: PackedContext) -> Tensor:
        cos, sin = (part.squeeze(0) for part in angles)
        norm = layer.input_layernorm.weight
        sequences = sequences_of(context, self.text)
        delta = hasattr(layer, "linear_attn")
        weights = delta_net_weights(norm, layer.linear_attn) if delta else attention_weights(norm, layer.self_attn)
        where = Where(sequences.cu_seqlens, sequences.boundaries, sequences.position, sequences.longest, cos, sin)
        x = self._apply(weights, where, x)
        second = layer.post_attention_layernorm.weight
        if not is_routed(layer):
            return self._apply(mlp_weights(second, layer.mlp), where, x)
        n = normed(x, second, self.norm, self.backend)
        if hasattr(layer.mlp, "shared_expert"):
            x = x + self._apply(shared_expert_weights(layer.mlp), where, n)
        return x + routed_sum(layer, n, self.backend)

    def _apply(self, weights: Any, where: Where, x: Tensor) -> Tensor:
        frozen = not any(base(weight).requires_grad for weight in weights)
        places = tuple(place for place, weight in enumerate(weights) if isinstance(weight, Adapted))
        kind: type = type(weights)
        block = _block(kind, self.norm, self.backend, places if frozen else None)
        pairs = [part for place in places for part in weights[place][1:]]
        result: Tensor = _Call.apply(block, where, x, *map(base, weights), *pairs)
        return result


def linear_weight(module: Any) -> Weight:
    """Return the weight of a linear layer, with its adapter where it has one that is on (`engines.adapters.lora`)."""
    if getattr(module, "lora_on", False):
        return Adapted(module.weight, module.lora_A, module.lora_B * module.lora_scale)
    weight: Tensor = module.weight
    return weight


def mlp_weights(norm: Tensor, gated: Any) -> MLPWeights:
    """Return the weights of a gated MLP and the norm before it."""
    return MLPWeights(norm, *(linear_weight(one) for one in (gated.gate_proj, gated.up_proj, gated.down_proj)))


def shared_expert_weights(block: Any) -> SharedExpertWeights:
    """Return the weights of the shared expert of a `Qwen3_5MoeSparseMoeBlock`."""
    one = block.shared_expert
    linears = (one.gate_proj, one.up_proj, one.down_proj, block.shared_expert_gate)
    return SharedExpertWeights(*map(linear_weight, linears))


def delta_net_weights(norm: Tensor, net: Any) -> DeltaNetWeights:
    """Return the weights of a `Qwen3_5GatedDeltaNet` and the norm before it."""
    return DeltaNetWeights(
        norm=norm,
        qkv=linear_weight(net.in_proj_qkv),
        z=linear_weight(net.in_proj_z),
        b=linear_weight(net.in_proj_b),
        a=linear_weight(net.in_proj_a),
        conv=net.conv1d.weight.squeeze(1),
        a_log=net.A_log,
        dt_bias=net.dt_bias,
        gated_norm=net.norm.weight,
        out=linear_weight(net.out_proj),
    )


def attention_weights(norm: Tensor, mixer: Any) -> AttentionWeights:
    """Return the weights of a `Qwen3_5Attention` or `Qwen3Attention` and the norm before it."""
    return AttentionWeights(
        norm=norm,
        q=linear_weight(mixer.q_proj),
        k=linear_weight(mixer.k_proj),
        v=linear_weight(mixer.v_proj),
        q_norm=mixer.q_norm.weight,
        k_norm=mixer.k_norm.weight,
        out=linear_weight(mixer.o_proj),
    )


_FUNCTIONS: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {
    MLPWeights: (mlp, mlp_grad),
    SharedExpertWeights: (shared_expert, shared_expert_grad),
    DeltaNetWeights: (delta_net, delta_net_grad),
    AttentionWeights: (attention, attention_grad),
}


@cache
def _block(kind: type, norm: Norm, backend: str | None, adapted: tuple[int, ...] | None) -> Block:
    function, gradient = _FUNCTIONS[kind]
    if adapted is not None:
        gradient = of_adapters_alone(gradient)
    plain = function, gradient
    if backend is None:
        return Block(kind, norm, adapted, *plain, plain)
    return Block(kind, norm, adapted, compiled(function, backend), compiled(gradient, backend), plain)


def _weights(block: Block, parts: Sequence[Tensor]) -> Any:
    """Return the block's weights from their concatenated tensors, adapters after all others."""
    count = len(block.kind._fields)  # type: ignore[attr-defined]
    weights: list[Any] = list(parts[:count])
    for number, place in enumerate(block.adapted or ()):
        weights[place] = Adapted(weights[place], *parts[count + 2 * number : count + 2 * number + 2])
    return block.kind(*weights)


class _Call(Function):
    """A block under autograd: its backward pass gets x, the weights and what the forward pass kept.

    Functions get `.data`: otherwise they would be compiled again for a view of another shape, or where gradients are
    off.
    """

    @staticmethod
    def forward(ctx: Any, block: Block, where: Where, x: Tensor, *weights: Tensor) -> Tensor:
        x, function = x.data, block.forward
        if x.shape[0] < MIN_TOKENS:
            function = block.plain[0]
        elif function is not block.plain[0]:
            mark_tokens((x, *_token_tensors(where)))
        y: Tensor
        y, saved = function(x, _weights(block, [w.data for w in weights]), where, block.norm)
        ctx.save_for_backward(x, *weights, *saved)
        ctx.block, ctx.where, ctx.count = block, where, len(weights)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        block, where, count = ctx.block, ctx.where, ctx.count
        x, *saved = ctx.saved_tensors
        weights, results = _weights(block, [w.data for w in saved[:count]]), tuple(saved[count:])
        grad, x, function = grads[0].contiguous().data, x.data, block.gradient
        tokens = x.shape[0]
        if tokens < MIN_TOKENS:
            function = block.plain[1]
        elif function is not block.plain[1]:
            mark_tokens((grad, x, *(one for one in results if one.ndim and one.shape[0] == tokens)))
        d_x, d_weights = function(grad, x, weights, results, where, block.norm)
        frozen = [None] * len(block.kind._fields) if block.adapted is not None else ()
        return None, None, d_x, *frozen, *d_weights


def _token_tensors(where: Where) -> tuple[Tensor, ...]:
    return where.cu_seqlens, where.boundaries, where.position, where.cos, where.sin
