"""How the functions of a layer are compiled: once for every number of tokens, and counted.

Token dimensions are dynamic, all others are compiled in, so that a batch of another length or of other sequences reuses
the compiled code. One token runs uncompiled: compilers take sizes of one for constants.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from engines.private_api import compiled_graphs, mark_dynamic

MIN_TOKENS = 2
"""Number of tokens below which (a dummy micro-batch is one token) functions run uncompiled."""

ONE_FOR_ALL_SIZES: dict[str, Any] = {"shape_padding": False, "triton.mix_order_reduction_non_strict_mode": True}
"""Inductor decides nothing by the number of tokens, where it would compile again for another number: it pads no matrix
product to a multiple of 8, and makes one kernel of reductions over rows and over columns of any number of elements
(else of 5 Mi or more alone, `MixOrderReduction.can_fuse`)."""


def compilations() -> int:
    """Return how many graphs this process has compiled so far."""
    return compiled_graphs()


@cache
def compiled(function: Callable[..., Any], backend: str = "inductor", whole: bool = True) -> Callable[..., Any]:
    """Return the function compiled, the same one for the whole process; `whole`: as one graph, or an error."""
    options = ONE_FOR_ALL_SIZES if backend == "inductor" else None
    return torch.compile(function, fullgraph=whole, backend=backend, options=options)


def mark_tokens(tensors: Sequence[Tensor]) -> None:
    """Mark dimension 0 of these tensors as one whose size changes from call to call."""
    for tensor in tensors:
        mark_dynamic(tensor, 0)
