"""Models in float64 from end to end, though they ask for float32 here and there: for proofs to nine digits."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

PRODUCTS = (Tensor.matmul, Tensor.__matmul__, torch.matmul)


class KeepFloat64(TorchFunctionMode):
    """A mode in which nothing turns a float64 tensor into float32: norms, softmaxes and losses keep float64.

    Models and libraries compute such parts in float32 at least, whatever the dtype of their weights is; two that agree
    to float32 alone could differ by an error of that size.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, with float64 in place of float32."""
        del types
        kwargs = dict(kwargs or {})
        parts = [part for arg in args for part in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        wide = any(isinstance(part, Tensor) and part.dtype == torch.float64 for part in parts)
        if wide and func is Tensor.float:
            return args[0]
        if wide and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if wide and func is Tensor.to:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if wide and func in PRODUCTS:  # of angles with positions, which are whole numbers made float32
            args = tuple(arg.double() for arg in args)
        return func(*args, **kwargs)
