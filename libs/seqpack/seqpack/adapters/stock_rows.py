"""Stock layers that mix tokens by code of their own (Mamba, convolutions, linear attention), on packed rows."""

from typing import Any

from torch import Tensor

from seqpack.adapters.context import PackedContext
from seqpack.adapters.subclasses import stock_class


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
