"""The packed forward of attention layers: a layer's stock code, with an attention function of our own.

Stock layers project, normalise and rotate, then look a function up in transformers' `ALL_ATTENTION_FUNCTIONS`. The
stock code of one layer instance is run over a table of its own that holds packed attention; transformers' table, and
every other model of the process, stay as they are.
"""

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from seqpack.adapters.context import PackedContext

_TABLE = "ALL_ATTENTION_FUNCTIONS"
_INERT = frozenset(["position_ids", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states"])
_INERT |= {"num_items_in_batch"}
"""Arguments of a stock attention call that have nothing to do with its result here: nothing is cached or returned, and
the count of a batch's labels, which trainers hand to the model, is the loss's."""


class PackedAttention:
    """In the place of transformers' table of attention functions, for one call: `context` does the mixing."""

    def __init__(self, context: PackedContext) -> None:
        self.context = context

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """Return the packed function, whichever implementation the config names."""
        del name, default
        return self.attend

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        **unknown: Any,
    ) -> tuple[Tensor, None]:
        """Attend in each sequence: query, key, value [1, heads, T, D] -> [1, T, heads, D].

        ValueError names an argument that is not handled.
        """
        del attention_mask  # packed attention is causal inside each sequence
        unhandled = sorted(name for name, value in unknown.items() if value is not None and name not in _INERT)
        if unhandled:
            raise ValueError(f"packed attention does not take {unhandled[0]} (from {type(module).__name__})")
        if dropout:
            raise ValueError("packed attention has no dropout: call model.eval(), or set attention_dropout to 0")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        q, k, v = (x.squeeze(0).transpose(0, 1).to(value.dtype) for x in (query, key, value))
        return self.context.ops.attention(q, k, v, self.context, scale, sliding_window).unsqueeze(0), None


def packed_attention_forward(layer: nn.Module) -> Callable[..., Any]:
    """Return a function (layer, context, *arguments of the stock forward): the stock forward over
    `PackedAttention(context)`.

    ValueError for a layer whose code does not look its attention function up in transformers' table.
    """

    def code_of(module: nn.Module) -> FunctionType:
        stock = inspect.unwrap(type(module).forward)
        if not isinstance(stock, FunctionType) or _TABLE not in stock.__code__.co_names:
            raise ValueError(f"{type(module).__name__} does not choose its attention through transformers' {_TABLE}")
        return stock

    code_of(layer)

    def forward(module: nn.Module, context: PackedContext, *args: Any, **kwargs: Any) -> Any:
        stock = code_of(module)  # now: another adaptation may have changed the class, or put it back
        names = {**stock.__globals__, _TABLE: PackedAttention(context)}
        own = FunctionType(stock.__code__, names, stock.__name__, stock.__defaults__, stock.__closure__)
        own.__kwdefaults__ = stock.__kwdefaults__
        return own(module, *args, **kwargs)

    return forward
