"""The products of a linear layer, as it is or with an adapter beside its frozen weight: y = W x + B (A x).

Functions of the layers' blocks call these in place of matrix products, so that one text serves both.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor


class Adapted(NamedTuple):
    """A frozen weight [out, in] and its adapter: `down` [rank, in], `up` [out, rank], times its scale."""

    weight: Tensor
    down: Tensor
    up: Tensor


class AdapterGrads(NamedTuple):
    """The gradients of an `Adapted` weight: those of its adapter."""

    down: Tensor
    up: Tensor


Weight = Tensor | Adapted


def base(w: Weight) -> Tensor:
    """Return the weight without its adapter."""
    return w.weight if isinstance(w, Adapted) else w


def project(x: Tensor, w: Weight) -> Tensor:
    """Return y [T, out] of x [T, in]."""
    if isinstance(w, Adapted):
        return x @ w.weight.t() + (x @ w.down.t()) @ w.up.t()
    return x @ w.t()


def input_grad(grad: Tensor, w: Weight) -> Tensor:
    """Return d x, from the gradient [T, out] of `project`."""
    if isinstance(w, Adapted):
        return grad @ w.weight + (grad @ w.up) @ w.down
    return grad @ w


def weight_grad(grad: Tensor, x: Tensor, w: Weight) -> Any:
    """Return d w, from the gradient [T, out] of `project`: a tensor, or `AdapterGrads`."""
    if isinstance(w, Adapted):
        return AdapterGrads((grad @ w.up).t() @ x, grad.t() @ (x @ w.down.t()))
    return grad.t() @ x


def adapter_grads(d_weights: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Return the adapters' gradients of a block's weights, concatenated."""
    return tuple(_each(d_weights))


def _each(d_weights: tuple[Any, ...]) -> Iterator[Tensor]:
    for gradient in d_weights:
        if isinstance(gradient, AdapterGrads):
            yield from gradient


@cache
def of_adapters_alone(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """Return the gradient function of a block with frozen weights: d x, then the adapters' gradients. Compiled, it does
    not compute the others."""

    def alone(*arguments: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        d_x, d_weights = gradient(*arguments)
        return d_x, adapter_grads(d_weights)

    return alone
