"""The norm behind the last layer as a compiled function, for packed calls (one row of tokens)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from engines.fast.compiling import MIN_TOKENS, compiled, mark_tokens
from engines.fast.pointwise import Norm, rms_norm, rms_norm_grad
from seqpack.adapters.subclasses import remove_mixin, set_mixin


def final_norm(x: Tensor, weight: Tensor, norm: Norm) -> Tensor:
    """Normalise x [T, H]."""
    return rms_norm(x, weight, norm)


def final_norm_grad(x: Tensor, weight: Tensor, norm: Norm, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return (d x, d weight) of `final_norm`, in their dtypes."""
    d_x, d_weight = rms_norm_grad(x, weight, norm, grad)
    return d_x.to(x.dtype), d_weight


def use_final_norm(module: Any, norm: Norm, backend: str | None) -> None:
    """Make this norm module run as a function where it is given one row of tokens."""
    set_mixin(module, FunctionNorm)
    vars(module)["function_options"] = norm, backend


def undo_final_norm(module: nn.Module) -> None:
    """Restore the norm; nothing where it is the stock one."""
    remove_mixin(module, FunctionNorm)
    vars(module).pop("function_options", None)


@contextmanager
def stock_norm(module: "FunctionNorm") -> Iterator[None]:
    """Give such a norm its stock class inside the block."""
    options = module.function_options
    undo_final_norm(module)
    try:
        yield
    finally:
        use_final_norm(module, *options)


class FunctionNorm(nn.Module):
    """The class of a norm that runs as a function, before its stock class."""

    weight: Tensor
    function_options: tuple[Norm, str | None]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise [1, T, H] by the function, anything else by the stock forward."""
        if hidden.dim() != 3 or hidden.shape[0] != 1:
            unpacked: Tensor = super().forward(hidden)
            return unpacked
        return normed(hidden.squeeze(0), self.weight, *self.function_options).unsqueeze(0)


def normed(x: Tensor, weight: Tensor, norm: Norm, backend: str | None) -> Tensor:
    """Return x [T, H] normalised by the function, under autograd."""
    result: Tensor = _Norm.apply(x, weight, norm, backend)
    return result


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: Norm, backend: str | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.norm, ctx.backend = norm, backend
        result: Tensor = _run(final_norm, backend, x.data, weight.data, norm)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_x, d_weight = _run(final_norm_grad, ctx.backend, x.data, weight.data, ctx.norm, grads[0].contiguous().data)
        return d_x, d_weight, None, None


def _run(function: Callable[..., Any], backend: str | None, x: Tensor, *rest: Any) -> Any:
    if backend is None or x.shape[0] < MIN_TOKENS:
        return function(x, *rest)
    mark_tokens((x, *(one for one in rest if isinstance(one, Tensor) and one.shape == x.shape)))
    return compiled(function, backend)(x, *rest)
