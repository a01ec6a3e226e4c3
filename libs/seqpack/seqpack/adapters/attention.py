"""Packed attention in stock layers, under a name of our own in transformers' registry of attention functions.

Stock layers project, normalise and rotate, then look up the function that their config names. The layers of an adapted
model have a copy of the config that names `NAME`; the model's own config, by which masks are made, stays as it is. A
call that carries a context goes to packed attention; one without goes to the function that the model's config names.
"""

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from seqpack.adapters.chunked_layers import chunk_of, query_scale, scales_queries
from seqpack.adapters.context import CONTEXT_KEY, PackedContext, carried
from seqpack.private_api import attention_of, set_attention

NAME = "seqpack_packed"
"""The name in `transformers.AttentionInterface`."""
_TABLE = "ALL_ATTENTION_FUNCTIONS"
_STOCK = "stock_attention"
IGNORED_KEYS = frozenset(
    ["position_ids", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states"]
)
IGNORED_KEYS |= {"num_items_in_batch"}
"""Arguments of a stock attention call that have nothing to do with its result here: nothing is cached or returned, and
the count of a batch's labels, which trainers hand to the model, is the loss's."""


@dataclass(frozen=True)
class StockAttention:
    """What a layer would use if it were not adapted: its config, and the function where that names "eager"."""

    config: Any
    eager: Callable[..., Any]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as transformers' registry asks for it: query, key, value [1, heads, T, D] -> [1, T, heads, D]."""
    context: PackedContext | None = options.pop(CONTEXT_KEY, None) or carried(attention_mask)
    if context is not None:
        function = context.attend or packed_attention
        return function(module, query, key, value, context, **options), None
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # seqpack does without transformers

    stock: StockAttention = vars(module)[_STOCK]
    function = ALL_ATTENTION_FUNCTIONS.get_interface(attention_of(stock.config), stock.eager)
    result: tuple[Tensor, Tensor | None] = function(module, query, key, value, attention_mask, **options)
    return result


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    context: PackedContext,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unknown: Any,
) -> Tensor:
    """Attend causally in each sequence; `softcap` bounds the scores, `s_aux` [heads] are sinks.

    What stock layers say by their mask alone (chunks) or by the place in a row (Llama 4's scale) is read off the layer.

    Raises:
        ValueError: an argument that is not handled, by its name; dropout.
    """
    unhandled = sorted(name for name, value in unknown.items() if value is not None and name not in IGNORED_KEYS)
    if unhandled:
        raise ValueError(f"packed attention does not take {unhandled[0]} (from {type(module).__name__})")
    if dropout:
        raise ValueError("packed attention has no dropout: call model.eval(), or set attention_dropout to 0")
    context.mixed.append(type(module).__name__)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))
    q = (q * query_scale(module, context)).to(q.dtype) if scales_queries(module) else q
    given = {"soft_cap": softcap, "sinks": s_aux, "chunk": chunk_of(module)}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return context.ops.attention(q, k, v, context, scale, sliding_window, **options).unsqueeze(0)


def stock_attention(layer: nn.Module) -> StockAttention:
    """Return what a layer uses. ValueError where it does not look its function up in transformers' registry."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # seqpack does without transformers

    code: Any = inspect.unwrap(type(layer).forward)
    names = getattr(code, "__globals__", {})
    if names.get(_TABLE) is not ALL_ATTENTION_FUNCTIONS or _TABLE not in code.__code__.co_names:
        raise ValueError(f"{type(layer).__name__} does not choose its attention through transformers' {_TABLE}")
    return StockAttention(layer.config, names["eager_attention_forward"])


def adapt_attention(layers: Iterable[nn.Module]) -> None:
    """Let these layers look up `NAME`. ValueError, with nothing changed, where one of them looks nothing up."""
    from transformers import AttentionInterface  # seqpack does without transformers

    stocks = {layer: stock_attention(layer) for layer in layers}
    AttentionInterface.register(NAME, attend)
    configs = {id(stock.config): copy.deepcopy(stock.config) for stock in stocks.values()}
    for config in configs.values():
        set_attention(config, NAME)
    for layer, stock in stocks.items():
        vars(layer)[_STOCK] = stock
        layer.config = configs[id(stock.config)]


def restore_attention(layer: nn.Module) -> None:
    """Give a layer its config back; nothing where it has it."""
    stock: StockAttention | None = vars(layer).pop(_STOCK, None)
    if stock is not None:
        layer.config = stock.config
