"""Routed experts with low-rank adapters beside frozen matrices, in grouped products: y = W_e x + scale B_e (A_e x).

It is `engines.experts.grouped_experts` written for autograd, which keeps more for the backward pass: rows, and what is
between the products. No gradient of a frozen matrix is computed, and no W + scale B A is made (peft makes one for all
experts of a layer). The plain reference is peft.

Shapes: as there; an adapter has A [E, r, in] and B [E, out, r]. On a GPU torch's grouped product takes ranks that are
multiples of 8; others run one expert after another.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from engines.experts.grouped_experts import sorted_pairs
from engines.experts.grouped_products import grouped_rows, grouped_rows_grad, grouped_weight_grad


class LowRank(NamedTuple):
    """An adapter of stacked matrices: A [E, r, in], B [E, out, r], and the factor of its output."""

    a: Tensor
    b: Tensor
    scale: float


class AdaptedExperts(NamedTuple):
    """The matrices of experts, [E, 2 I, H] and [E, H, I], each with an adapter or None."""

    gate_up: Tensor
    down: Tensor
    of_gate_up: LowRank | None
    of_down: LowRank | None


def adapted_rows(x: Tensor, top_scores: Tensor, experts: AdaptedExperts, ends: Tensor) -> Tensor:
    """Return each row's result times its weight, [S, H], of rows x [S, H] sorted by expert; `top_scores` [S]."""
    gate, up = _wide(_product(x, experts.gate_up, experts.of_gate_up, ends)).chunk(2, dim=-1)
    between = (silu(gate) * up * _wide(top_scores).unsqueeze(-1)).to(x.dtype)
    return _product(between, experts.down, experts.of_down, ends)


def adapted_tokens(x: Tensor, chosen: Tensor, top_scores: Tensor, experts: AdaptedExperts) -> Tensor:
    """Return the sum of each token's experts, [T, H], of x [T, H], experts i64[T, k] and their weights [T, k]."""
    each = chosen.shape[1]
    pairs, ends = sorted_pairs(chosen, experts.gate_up.shape[0])
    rows = x.index_select(0, pairs.order // each)
    weights = top_scores.reshape(-1).index_select(0, pairs.order)
    result = adapted_rows(rows, weights, experts, ends).index_select(0, pairs.place)
    return _wide(result.view(-1, each, x.shape[1])).sum(1).to(x.dtype)


def _product(x: Tensor, weight: Tensor, adapter: LowRank | None, ends: Tensor) -> Tensor:
    out: Tensor = _Grouped.apply(x, weight, ends)
    if adapter is None:
        return out
    low: Tensor = _Grouped.apply(x, adapter.a.to(x.dtype), ends)
    added: Tensor = _Grouped.apply(low * adapter.scale, adapter.b.to(x.dtype), ends)
    return out + added


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _Grouped(Function):
    """Rows [S, in] times the matrix of their expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, ends)
        return grouped_rows(x, weight, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, ends = ctx.saved_tensors
        d_x = grouped_rows_grad(grads[0], weight, ends) if ctx.needs_input_grad[0] else None
        return d_x, None if x is None else grouped_weight_grad(grads[0], x, ends), None
