"""Decoder layers of one model that run as two functions each, mixer and MLP, under autograd.

`use_layer_functions(model)` replaces the forward of each decoder layer instance, and only for calls that carry a
`PackedContext`; hooks of FSDP and recomputation stay outside. The adaptation of `engines.packing` stays as it was
for everything else. The plain reference is the same model without it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from engines.families.registry import family_of
from engines.fast.blocks import (
    AttentionWeights,
    DeltaNetWeights,
    MLPWeights,
    Where,
    attention,
    attention_grad,
    delta_net,
    delta_net_grad,
    mlp,
    mlp_grad,
)
from engines.fast.compiling import FEWEST_TOKENS, compiled, mark_tokens
from engines.fast.delta_rule import prepare_delta_rule
from engines.fast.final_norm import use_final_norm
from engines.fast.sequences import Sequences
from seqpack.adapters.context import PackedContext
from seqpack.adapters.model import CONTEXT_KEY


class Block(NamedTuple):
    """A function and its gradient (`engines.fast.blocks`), as they are, and as they are called."""

    kind: type
    eps: float
    forward: Callable[..., Any]
    gradient: Callable[..., Any]
    plain: tuple[Callable[..., Any], Callable[..., Any]]


@dataclass(frozen=True)
class LayerFunctions:
    """What `use_layer_functions` changed: `forward` of these modules. `undo()` restores them."""

    modules: tuple[nn.Module, ...]

    def undo(self) -> None:
        """Restore the layers; a second call does nothing."""
        for module in self.modules:
            module.__dict__.pop("forward", None)


def use_layer_functions(model: Any, backend: str | None = "inductor") -> LayerFunctions:
    """Let the decoder layers of a Qwen3.5 model, adapted for packing, run as functions on packed calls.

    `backend`: torch.compile's, None to run them uncompiled. Whether the model can is asked before
    (`engines.fast.support`).
    """
    family = family_of(model.config)
    layers = tuple(family.layers(model))
    text = model.config.get_text_config()
    names = {id(mixer): name for name, mixer in model.named_modules()}
    for layer in layers:
        mixer = next(iter(family.mixers(layer)))[0]
        run = _Layer(names[id(mixer)], text, backend)
        layer.forward = MethodType(run.forward_over(layer.forward), layer)
    norm = model.base_model.norm
    use_final_norm(norm, float(text.rms_norm_eps), backend)
    return LayerFunctions((*layers, norm))


def sequences_of(context: PackedContext, text: Any) -> Sequences:
    """Return the boundaries of a context in every form, made when first asked for; `text`: the model's text config."""
    found: Sequences | None = context.derived.get("sequences")
    if found is None:
        edges = context.edges if context.edges is not None else tuple(context.cu_seqlens.tolist())
        found = context.derived["sequences"] = Sequences.of(context.cu_seqlens, edges, context.positions)
        if "linear_attention" in text.layer_types:
            prepare_delta_rule(found.boundaries, edges, text.linear_num_value_heads)
    return found


class _Layer:
    """The forward of one decoder layer."""

    def __init__(self, name: str, text: Any, backend: str | None) -> None:
        self.name = name
        self.text = text
        eps = float(text.rms_norm_eps)
        self.mlp = _block(MLPWeights, eps, backend)
        self.delta_net = _block(DeltaNetWeights, eps, backend)
        self.attention = _block(AttentionWeights, eps, backend)

    def forward_over(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the method that takes the place of `original`."""

        def forward(layer: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            context: PackedContext | None = kwargs.get(CONTEXT_KEY)
            if context is None:
                return original(hidden_states, *args, **kwargs)
            context.mixed.append(self.name)
            return self.run(layer, hidden_states.squeeze(0), kwargs["position_embeddings"], context).unsqueeze(0)

        return forward

    def run(self, layer: Any, x: Tensor, angles: tuple[Tensor, Tensor], context: PackedContext) -> Tensor:
        cos, sin = (part.squeeze(0) for part in angles)
        norm = layer.input_layernorm.weight
        sequences = sequences_of(context, self.text)
        if hasattr(layer, "linear_attn"):
            net = layer.linear_attn
            weights: tuple[Tensor, ...] = delta_net_weights(norm, net)
            block = self.delta_net
        else:
            weights, block = attention_weights(norm, layer.self_attn), self.attention
        where = Where(sequences.cu_seqlens, sequences.boundaries, sequences.position, sequences.longest, cos, sin)
        x = _Call.apply(block, where, x, *weights)
        gated = layer.mlp
        after = MLPWeights(
            layer.post_attention_layernorm.weight, gated.gate_proj.weight, gated.up_proj.weight, gated.down_proj.weight
        )
        result: Tensor = _Call.apply(self.mlp, where, x, *after)
        return result


def delta_net_weights(norm: Tensor, net: Any) -> DeltaNetWeights:
    """Return the weights of a `Qwen3_5GatedDeltaNet` and the norm before it."""
    return DeltaNetWeights(
        norm=norm,
        qkv=net.in_proj_qkv.weight,
        z=net.in_proj_z.weight,
        b=net.in_proj_b.weight,
        a=net.in_proj_a.weight,
        conv=net.conv1d.weight.squeeze(1),
        a_log=net.A_log,
        dt_bias=net.dt_bias,
        gated_norm=net.norm.weight,
        out=net.out_proj.weight,
    )


def attention_weights(norm: Tensor, mixer: Any) -> AttentionWeights:
    """Return the weights of a `Qwen3_5Attention` and the norm before it."""
    return AttentionWeights(
        norm=norm,
        q=mixer.q_proj.weight,
        k=mixer.k_proj.weight,
        v=mixer.v_proj.weight,
        q_norm=mixer.q_norm.weight,
        k_norm=mixer.k_norm.weight,
        out=mixer.o_proj.weight,
    )


_FUNCTIONS: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {
    MLPWeights: (mlp, mlp_grad),
    DeltaNetWeights: (delta_net, delta_net_grad),
    AttentionWeights: (attention, attention_grad),
}


@cache
def _block(kind: type, eps: float, backend: str | None) -> Block:
    plain = _FUNCTIONS[kind]
    if backend is None:
        return Block(kind, eps, *plain, plain)
    return Block(kind, eps, compiled(plain[0], backend), compiled(plain[1], backend), plain)


class _Call(Function):
    """A block under autograd: its backward pass gets x, the weights and what the forward pass kept.

    Functions are given `.data`: others would be compiled again where a view is of another shape, or where gradients are
    not wanted.
    """

    @staticmethod
    def forward(ctx: Any, block: Block, where: Where, x: Tensor, *weights: Tensor) -> Tensor:
        x, function = x.data, block.forward
        if x.shape[0] < FEWEST_TOKENS:
            function = block.plain[0]
        elif function is not block.plain[0]:
            mark_tokens((x, *_token_tensors(where)))
        y: Tensor
        y, kept = function(x, block.kind(*(w.data for w in weights)), where, block.eps)
        ctx.save_for_backward(x, *weights, *kept)
        ctx.block, ctx.where = block, where
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        block, where, count = ctx.block, ctx.where, len(ctx.block.kind._fields)
        x, *saved = ctx.saved_tensors
        weights, kept = block.kind(*(w.data for w in saved[:count])), tuple(saved[count:])
        grad, x, function = grads[0].contiguous().data, x.data, block.gradient
        tokens = x.shape[0]
        if tokens < FEWEST_TOKENS:
            function = block.plain[1]
        elif function is not block.plain[1]:
            mark_tokens((grad, x, *(one for one in kept if one.ndim and one.shape[0] == tokens)))
        d_x, d_weights = function(grad, x, weights, kept, where, block.eps)
        return None, None, d_x, *d_weights


def _token_tensors(where: Where) -> tuple[Tensor, ...]:
    return where.cu_seqlens, where.boundaries, where.position, where.cos, where.sin
