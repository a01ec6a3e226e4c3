"""Token-by-token pieces of a layer, each one node of the graph: compiled forward, compiled gradient, inputs kept.

The arithmetic is `engines.fast.pointwise`'s. Between the pieces run megatron-core's parallel linears, so a piece sees
the tokens and heads of its rank alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from engines.fast import pointwise
from engines.fast.compiling import MIN_TOKENS, compiled, mark_tokens


class FusedFunction(NamedTuple):
    """`forward(*operands)`, and `gradient(*operands, grad)` of the first of them, as many as it returns."""

    forward: Callable[..., Tensor]
    gradient: Callable[..., tuple[Tensor, ...]]


def run(piece: FusedFunction, backend: str | None, *operands: Any) -> Tensor:
    """Compute a piece, uncompiled for `backend` None. Operands with as many rows as the first have one row a token."""
    result: Tensor = _Call.apply(piece, backend, *operands)
    return result


class _Call(Function):
    @staticmethod
    def forward(ctx: Any, piece: FusedFunction, backend: str | None, *operands: Any) -> Tensor:
        ctx.save_for_backward(*(one for one in operands if isinstance(one, Tensor)))
        ctx.rest = tuple(one for one in operands if not isinstance(one, Tensor))  # they come last
        ctx.piece, ctx.backend = piece, backend
        result: Tensor = _run(piece.forward, backend, *operands)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        tensors = ctx.saved_tensors
        gradients = _run(ctx.piece.gradient, ctx.backend, *tensors, *ctx.rest, grads[0].contiguous())
        missing = len(tensors) + len(ctx.rest) - len(gradients)
        return None, None, *gradients, *(None,) * missing


def _run(function: Callable[..., Any], backend: str | None, *operands: Any) -> Any:
    """Run a function, compiled once for every number of tokens."""
    bare = [one.data if isinstance(one, Tensor) else one for one in operands]
    tokens = bare[0].shape[0]
    if backend is None or tokens < MIN_TOKENS:
        return function(*bare)
    mark_tokens([one for one in bare if isinstance(one, Tensor) and one.ndim > 1 and one.shape[0] == tokens])
    return compiled(function, backend)(*bare)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return pointwise.rms_norm(x, weight, pointwise.Norm(eps))


def _norm_gradient(x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, ...]:
    d_x, d_weight = pointwise.rms_norm_grad(x, weight, pointwise.Norm(eps), grad)
    return d_x.to(x.dtype), d_weight


def _gated_norm_gradient(x: Tensor, gate: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, ...]:
    return pointwise.gated_norm_grad(x, gate, weight, eps, grad)


def _swiglu(joined: Tensor) -> Tensor:
    gate, up = joined.chunk(2, dim=-1)
    return pointwise.swiglu(gate, up)


def _swiglu_gradient(joined: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    gate, up = joined.chunk(2, dim=-1)
    return (torch.cat(pointwise.swiglu_grad(gate, up, grad), dim=-1),)


def _rotate_gradient(x: Tensor, cos: Tensor, sin: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    del x
    return (pointwise.rotate_grad(grad, cos, sin),)


def _decay_gradient(a: Tensor, a_log: Tensor, dt_bias: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    return pointwise.decay_grad(a, a_log, dt_bias, grad)


def _gate(x: Tensor, gate: Tensor) -> Tensor:
    return (pointwise.to_float32(x) * pointwise.to_float32(gate).sigmoid()).to(x.dtype)


def _gate_gradient(x: Tensor, gate: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    g, s = pointwise.to_float32(grad), pointwise.to_float32(gate).sigmoid()
    return (g * s).to(x.dtype), (g * pointwise.to_float32(x) * s * (1.0 - s)).to(gate.dtype)


NORM = FusedFunction(_norm, _norm_gradient)
"""(x [T, ..., D], weight [D], eps): its weight is kept as its distance from one."""
GATED_NORM = FusedFunction(pointwise.gated_norm, _gated_norm_gradient)
"""(x [T, heads, D], gate [T, heads, D], weight [D], eps)."""
SWIGLU = FusedFunction(_swiglu, _swiglu_gradient)
"""(gate and up in one [T, ..., 2 * D])."""
ROTATE = FusedFunction(pointwise.rotate, _rotate_gradient)
"""(x [T, heads, D], cos [T, R], sin [T, R]); angles have no gradient."""
DECAY = FusedFunction(pointwise.decay, _decay_gradient)
"""(a [T, heads], a_log [heads], dt_bias [heads]) -> float32."""
GATE = FusedFunction(_gate, _gate_gradient)
"""(x, gate), of one shape: x * sigmoid(gate)."""
