"""Matrix products of many tokens at once, by the quicker of two libraries.

Torch hands float32 products on a CPU to MKL. oneDNN, which torch has beside it, does them at twice the rate where MKL
does not know the processor (an AMD EPYC with AVX-512: 240 against 105 GFLOP/s), and costs 8 microseconds more a call.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

WORTHWHILE = 1 << 21
"""Multiplications of a product from which oneDNN does it."""
MIN_ROWS = 8
"""Fewer rows wait for memory, whoever multiplies."""

# What torch's own compiler calls for a frozen linear layer; None in a build without oneDNN.
_ONEDNN: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def worthwhile(x: Tensor, outputs: int) -> bool:
    """Whether oneDNN should multiply x [T, H] by a matrix of so many outputs."""
    return (
        x.shape[0] >= MIN_ROWS
        and x.shape[0] * x.shape[1] * outputs >= WORTHWHILE
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and _ONEDNN is not None
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, H] times the transpose of weight [N, H], plus bias [N]: [T, N]. Without gradients."""
    if worthwhile(x, weight.shape[0]):
        done: Tensor = _ONEDNN(x, weight, bias, "none", [], "")
        return done
    return linear(x, weight, bias)
