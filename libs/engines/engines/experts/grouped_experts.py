"""Routed experts as one function of all tokens, with an explicit backward pass.

1. The (token, expert) pairs are sorted by expert: their order is the one permutation there is.
2. One gather brings the rows in, two grouped products (`engines.experts.grouped_products`) compute all experts, and one
   gather and sum (on a CPU: one addition at indices) brings the results out.
3. The router's weights go in between the two products, as in megatron-core: their gradient needs no results kept.

Kept for the backward pass are the tokens as they came and the first product. A sum over a token's experts, and what is
between the products, are float32 (float64 for float64). The plain reference is the loop of transformers ("eager").

Shapes: T tokens of H features, k experts a token, S = T k pairs; weights [E, 2 I, H] (gate over up) and [E, H, I].
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from engines.experts.grouped_products import grouped_rows, grouped_rows_grad, grouped_weight_grad

Run = Callable[..., Any]


class Pairs(NamedTuple):
    """The pairs sorted by expert: `order` i64[S], the pair (token k + choice) at each place; `place` i64[S], its
    inverse."""

    order: Tensor
    place: Tensor


def sorted_pairs(experts: Tensor, number: int) -> tuple[Pairs, Tensor]:
    """Sort the pairs of experts i64[T, k], of `number` experts; the second result is i32[E], the number of pairs up to
    the end of each expert's."""
    values, order = experts.reshape(-1).to(torch.int32).sort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    every = torch.arange(number, dtype=torch.int32, device=order.device)
    return Pairs(order, place), torch.searchsorted(values, every, right=True, out_int32=True)


def sorted_experts(x: Tensor, top_scores: Tensor, gate_up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
    """Return each row's result times its weight, [S, H], of rows x [S, H] sorted by expert; `top_scores` [S]."""
    result: Tensor = _Sorted.apply(x, top_scores, gate_up, down, ends)
    return result


def routed_experts(
    x: Tensor, experts: Tensor, top_scores: Tensor, gate_up: Tensor, down: Tensor, run: Run | None = None
) -> Tensor:
    """Return the sum of each token's experts, [T, H], of x [T, H], experts i64[T, k] and their weights [T, k].

    `run(function, *arguments)` calls `routed` and `routed_grad`, such as compiled; None: as they are.
    """
    pairs, ends = sorted_pairs(experts, gate_up.shape[0])
    result: Tensor = _Routed.apply(run or _as_they_are, pairs, ends, x, top_scores, gate_up, down)
    return result


def _as_they_are(function: Run, *arguments: Any) -> Any:
    return function(*arguments)


def expert_mlp(x: Tensor, top_scores: Tensor, gate_up: Tensor, down: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Return (results [S, H] of sorted rows x [S, H] times `top_scores` [S], the first product [S, 2 I])."""
    h = grouped_rows(x, gate_up, ends)
    gate, up = _wide(h).chunk(2, dim=-1)
    a = (silu(gate) * up * _wide(top_scores).unsqueeze(-1)).to(x.dtype)
    return grouped_rows(a, down, ends), h


def expert_mlp_grad(
    grad: Tensor, h: Tensor, x: Tensor, top_scores: Tensor, gate_up: Tensor, down: Tensor, ends: Tensor, trained: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return (d x, d top_scores, d gate_up, d down) of `expert_mlp`; the last two where weights are `trained`."""
    d_a, weight = _wide(grouped_rows_grad(grad, down, ends)), _wide(top_scores).unsqueeze(-1)
    gate, up = _wide(h).chunk(2, dim=-1)
    active = silu(gate)
    both = active * up
    d_top_scores = (d_a * both).sum(-1).to(top_scores.dtype)
    d_both = d_a * weight
    d_h = torch.cat([torch.ops.aten.silu_backward(d_both * up, gate), d_both * active], dim=-1).to(x.dtype)
    d_x = grouped_rows_grad(d_h, gate_up, ends)
    if not trained:
        return d_x, d_top_scores, None, None
    a = (both * weight).to(x.dtype)
    return d_x, d_top_scores, grouped_weight_grad(d_h, x, ends), grouped_weight_grad(grad, a, ends)


def routed(
    x: Tensor, top_scores: Tensor, pairs: Pairs, gate_up: Tensor, down: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (the sum of each token's experts [T, H], the first product [S, 2 I])."""
    each = top_scores.shape[1]
    rows = x.index_select(0, pairs.order // each)
    y, h = expert_mlp(rows, top_scores.reshape(-1).index_select(0, pairs.order), gate_up, down, ends)
    return _summed(y, pairs, each), h


def routed_grad(
    grad: Tensor,
    h: Tensor,
    x: Tensor,
    top_scores: Tensor,
    pairs: Pairs,
    gate_up: Tensor,
    down: Tensor,
    ends: Tensor,
    trained: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return (d x, d top_scores, d gate_up, d down) of `routed`; the last two where weights are `trained`."""
    each = top_scores.shape[1]
    token = pairs.order // each
    rows, weights = x.index_select(0, token), top_scores.reshape(-1).index_select(0, pairs.order)
    d_rows, d_weights, d_gate_up, d_down = expert_mlp_grad(
        grad.index_select(0, token), h, rows, weights, gate_up, down, ends, trained
    )
    d_top_scores = d_weights.index_select(0, pairs.place).view(-1, each)
    return _summed(d_rows, pairs, each), d_top_scores, d_gate_up, d_down


def _summed(rows: Tensor, pairs: Pairs, each: int) -> Tensor:
    """Sum sorted rows [S, H] to tokens [T, H], in an order that is always the same."""
    if rows.device.type == "cpu" and rows.dtype != torch.bfloat16:
        tokens = rows.shape[0] // each
        return rows.new_zeros(tokens, rows.shape[1]).index_add_(0, pairs.order // each, rows)
    gathered = rows.index_select(0, pairs.place).view(-1, each, rows.shape[1])
    return _wide(gathered).sum(1).to(rows.dtype)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _Sorted(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, top_scores: Tensor, gate_up: Tensor, down: Tensor, ends: Tensor) -> Tensor:
        y, h = expert_mlp(x, top_scores, gate_up, down, ends)
        ctx.save_for_backward(h, x, top_scores, gate_up, down, ends)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        h, x, top_scores, gate_up, down, ends = ctx.saved_tensors
        trained = any(ctx.needs_input_grad[2:4])
        return *expert_mlp_grad(grads[0], h, x, top_scores, gate_up, down, ends, trained), None


class _Routed(Function):
    """Functions get `.data`, as in `engines.fast.layers`: they are compiled once, whatever the gradients."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, pairs: Pairs, ends: Tensor, x: Tensor, top_scores: Tensor, gate_up: Tensor, down: Tensor
    ) -> Tensor:
        y: Tensor
        y, h = run(routed, x.data, top_scores.data, pairs, gate_up.data, down.data, ends)
        ctx.save_for_backward(h, ends, *pairs, x, top_scores, gate_up, down)
        ctx.run = run
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        h, ends, order, place, *operands = ctx.saved_tensors
        x, top_scores, gate_up, down = (one.data for one in operands)
        trained, grad = any(ctx.needs_input_grad[5:7]), grads[0].contiguous().data
        d = ctx.run(routed_grad, grad, h, x, top_scores, Pairs(order, place), gate_up, down, ends, trained)
        return None, None, None, *d
