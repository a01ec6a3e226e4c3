"""Stock layers that mix tokens by code of their own (Mamba, convolutions, linear attention, attention that does not ask
transformers' table), on packed rows."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from seqpack.adapters.context import PackedContext
from seqpack.adapters.subclasses import stock_class
from seqpack.private_api import bloom_heads

_BASE, _DIGITS = 256, 4
"""Token numbers travel as digits, which every floating-point dtype holds."""


def stock_rows(layer: Any, x: Tensor, context: PackedContext) -> Tensor:
    """Run the stock forward of a causal layer on x [T, H], each sequence as the beginning of a row of its own.

    It is called with hidden states alone: masks and caches are not for packed rows.
    """
    forward = stock_class(layer).forward

    def run(rows: Tensor) -> Tensor:
        result = forward(layer, rows)
        if not isinstance(result, Tensor):
            raise ValueError(f"{type(layer).__name__} does not return hidden states alone: it has no packed form")
        return result

    return context.ops.by_rows(run, x, context)


def own_attention(layer: Any, hidden: Tensor, context: PackedContext, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Run attention of a layer's own code on hidden [1, T, H], each sequence in a row of its own with a causal mask.

    What else the layer is given by token (positions, rotary factors, keys that another layer chose) goes to the same
    rows, and keys that it chose come back by token.
    """
    return _in_rows(layer, hidden, context, given, True)


def own_rows(layer: Any, hidden: Tensor, context: PackedContext, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Run a causal layer of its own code (MiniMax's linear attention) as `own_attention`, without a mask."""
    return _in_rows(layer, hidden, context, given, False)


def _in_rows(
    layer: Any, hidden: Tensor, context: PackedContext, given: Mapping[str, Any], masked: bool
) -> tuple[Any, ...]:
    tokens, forward = hidden.shape[1], stock_class(layer).forward
    others: list[Any] = []
    chosen: list[tuple[Tensor, Tensor]] = []
    powers = _BASE ** torch.arange(_DIGITS, device=hidden.device)
    digits = torch.arange(1, tokens + 1, device=hidden.device)[:, None] // powers % _BASE  # zero: padding

    def run(x: Tensor) -> Tensor:
        rows, number = x[..., :-_DIGITS], (x[..., -_DIGITS:].to(torch.int64) * powers).sum(-1)
        place = (number - 1).clamp(min=0)
        options = {
            name: at_places(value, place, tokens, name) for name, value in given.items() if name != "attention_mask"
        }
        for name, keys in options.items():
            if _are_keys(keys, number):  # padding has no keys: those of another row may lie behind the end of this one
                options[name] = keys.masked_fill((number == 0)[..., None], 0)
        below = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        if window := getattr(layer, "sliding_window", None):
            below = below.triu(1 - window)
        mask = torch.zeros_like(below, dtype=x.dtype).masked_fill(~below, torch.finfo(x.dtype).min)
        causal = mask.expand(len(x), 1, *mask.shape) if masked else None
        result, *rest = forward(layer, rows, **options, attention_mask=causal)
        chosen.extend((number, keys) for keys in rest if _are_keys(keys, number))
        others[:] = rest
        return result  # type: ignore[no-any-return]

    out = context.ops.by_rows(run, torch.cat([hidden.squeeze(0), digits.to(hidden.dtype)], 1), context)
    return (out.unsqueeze(0), *(_by_token(chosen, tokens) if _are_keys(one) else one for one in others))


def _are_keys(value: Any, places: Tensor | None = None) -> bool:
    """Return whether a result of a layer is places of keys [n, L, k] that it chose."""
    integers = isinstance(value, Tensor) and not value.is_floating_point()
    return integers and value.ndim == 3 and (places is None or value.shape[:2] == places.shape)


def _by_token(chosen: list[tuple[Tensor, Tensor]], tokens: int) -> Tensor:
    """Return the keys of rows by token, [1, T, k]; where rows chose fewer, the first stands several times."""
    most = max(keys.shape[-1] for _, keys in chosen)
    first = chosen[0][1]
    result = first.new_zeros(tokens + 1, most)
    for numbers, keys in chosen:
        wide = torch.cat([keys, keys[..., :1].expand(*keys.shape[:2], most - keys.shape[-1])], -1)
        result[numbers.flatten()] = wide.flatten(0, 1)
    return result[None, 1:]


def bloom_attention(layer: Any, hidden: Tensor, context: PackedContext, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Run Bloom's attention on hidden [1, T, H], with the slopes of ALiBi from the bias of two positions."""
    if layer.training and layer.attention_dropout.p:
        raise ValueError("packed attention has no dropout: call model.eval(), or set attention_dropout to 0")
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in bloom_heads(layer, layer.query_key_value(hidden)))
    bias = given["alibi"][:, 0].as_subclass(Tensor)
    slopes = bias[:, 1] - bias[:, 0]
    out = context.ops.attention(q, k, v, context, layer.inv_norm_factor, None, alibi=slopes)
    out = layer.dense(out.reshape(hidden.shape))
    return given["residual"] + functional.dropout(out, layer.hidden_dropout, layer.training), None


def mpt_attention(layer: Any, hidden: Tensor, context: PackedContext, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """Run MPT's attention on hidden [1, T, H], with the slopes of ALiBi from the bias of all positions."""
    if layer.training and layer.attn_dropout_p:
        raise ValueError("packed attention has no dropout: call model.eval(), or set attn_pdrop to 0")
    mixed = layer.Wqkv(hidden.squeeze(0))
    if layer.clip_qkv:
        mixed = mixed.clamp(min=-layer.clip_qkv, max=layer.clip_qkv)
    q, k, v = (x.reshape(len(x), layer.n_heads, layer.head_dim) for x in mixed.chunk(3, dim=1))
    slopes = -given["position_bias"][:, 0, -2]
    out = context.ops.attention(q, k, v, context, layer.softmax_scale, None, alibi=slopes)
    return layer.out_proj(out.reshape(hidden.shape)), None


def takes_arguments(packed: Callable[..., Any]) -> bool:
    """Return whether a packed form asks for what else its layer is called with."""
    return len(inspect.signature(packed).parameters) == 4


def given_arguments(layer: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return what a layer is called with beside its hidden states, by the names of its stock forward."""
    signature = inspect.signature(stock_class(layer).forward)
    bound = signature.bind(layer, hidden, *args, **kwargs).arguments
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    return {name: value for name, value in list(bound.items())[2:] if kinds[name] != inspect.Parameter.VAR_KEYWORD}


def at_places(value: Any, place: Tensor, tokens: int, name: str) -> Any:
    """Return what rows of tokens are given: of a tensor [1, T, ...] or [axes, 1, T] the entries at these places."""
    if isinstance(value, dict):
        return {key: at_places(one, place, tokens, name) for key, one in value.items()}
    if isinstance(value, tuple):
        return tuple(at_places(one, place, tokens, name) for one in value)
    if not isinstance(value, Tensor):
        return value
    if value.shape[:2] == (1, tokens):
        return value[0][place]
    if value.shape[1:] == (1, tokens):
        return value[:, 0][:, place]
    raise ValueError(f"packed rows have no {name} of shape {tuple(value.shape)}")
