"""The norm behind the last layer as a compiled function, for packed calls (one row of tokens)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from engines.fast.compiling import MIN_TOKENS, compiled, mark_tokens
from engines.fast.pointwise import rms_norm, rms_norm_grad
from seqpack.adapters.subclasses import remove_mixin, set_mixin


def final_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise x [T, H]."""
    return rms_norm(x, weight, eps)


def final_norm_grad(x: Tensor, weight: Tensor, eps: float, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return (d x, d weight) of `final_norm`, in their dtypes."""
    d_x, d_weight = rms_norm_grad(x, weight, eps, grad)
    return d_x.to(x.dtype), d_weight


def use_final_norm(norm: Any, eps: float, backend: str | None) -> None:
    """Make this norm module run as a function where it is given one row of tokens."""
    set_mixin(norm, FunctionNorm)
    vars(norm)["function_options"] = eps, backend


def undo_final_norm(norm: nn.Module) -> None:
    """Restore the norm; nothing where it is the stock one."""
    remove_mixin(norm, FunctionNorm)
    vars(norm).pop("function_options", None)


@contextmanager
def stock_norm(norm: "FunctionNorm") -> Iterator[None]:
    """Give such a norm its stock class inside the block."""
    options = norm.function_options
    undo_final_norm(norm)
    try:
        yield
    finally:
        use_final_norm(norm, *options)


class FunctionNorm(nn.Module):
    """The class of a norm that runs as a function, before its stock class."""

    weight: Tensor
    function_options: tuple[float, str | None]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise [1, T, H] by the function, anything else by the stock forward."""
        if hidden.dim() != 3 or hidden.shape[0] != 1:
            unpacked: Tensor = super().forward(hidden)
            return unpacked
        result: Tensor = _Norm.apply(hidden.squeeze(0), self.weight, *self.function_options).unsqueeze(0)
        return result


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, backend: str | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.backend = eps, backend
        result: Tensor = _run(final_norm, backend, x.data, weight.data, eps)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_x, d_weight = _run(final_norm_grad, ctx.backend, x.data, weight.data, ctx.eps, grads[0].contiguous().data)
        return d_x, d_weight, None, None


def _run(function: Callable[..., Any], backend: str | None, x: Tensor, *rest: Any) -> Any:
    if backend is None or x.shape[0] < MIN_TOKENS:
        return function(x, *rest)
    mark_tokens((x, *(one for one in rest if isinstance(one, Tensor) and one.shape == x.shape)))
    return compiled(function, backend)(x, *rest)
