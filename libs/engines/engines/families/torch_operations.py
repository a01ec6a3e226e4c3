"""Stock gated delta net layers in host memory, where the kernels that transformers picked cannot run.

When the file of a model is imported, transformers takes the operations of `causal_conv1d` and `fla` if these packages
can be imported, whatever device is there: a layer then hands tensors in host memory to CUDA kernels. After
`choose_torch_operations(model)` the layers of one model instance choose by the device of what they are given:
transformers' own PyTorch functions for host memory, what was picked before elsewhere.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from engines.families.registry import family_of
from seqpack.adapters.subclasses import remove_mixin, set_mixin, stock_class

_OPERATIONS = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
)
"""Names under which a stock layer calls operations; each wraps the PyTorch function that it stands for."""
_PACKED = ("cu_seqlens", "seq_idx")


@dataclass(frozen=True)
class TorchOperations:
    """The changes of `choose_torch_operations`: the class of these modules, by name. `undo()` restores them."""

    layers: dict[str, nn.Module]

    def undo(self) -> None:
        """Restore the layers as they were; a second call does nothing."""
        for module in self.layers.values():
            for kind in (_ByDevice, _InTorch):
                remove_mixin(module, kind)


def choose_torch_operations(model: Any, all_devices: bool = False) -> TorchOperations:
    """Make this model's stock delta net layers compute in PyTorch where their input is in host memory, or everywhere.

    ValueError where another adaptation changed a layer, or a layer's code calls none of the operations.
    """
    family = family_of(model.config)
    layers = {name: module for name, module in model.named_modules() if type(module).__name__ in family.delta_nets}
    for name, module in layers.items():
        if "forward" in vars(module) or stock_class(module) is not type(module):
            raise ValueError(f"another adaptation already changed {name}: undo that one first")
        kind: Any = type(module)
        _in_torch(kind)
    for module in layers.values():
        set_mixin(module, _InTorch if all_devices else _ByDevice)
    return TorchOperations(layers)


class _ByDevice(nn.Module):
    """The class of a layer that chooses by the device of its input, before its stock class."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        if hidden_states.device.type == "cpu":
            kind: Any = stock_class(self)
            return _in_torch(kind)(self, hidden_states, *args, **kwargs)
        return super().forward(hidden_states, *args, **kwargs)


class _InTorch(nn.Module):
    """The class of a layer that computes in PyTorch on any device, before its stock class."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer."""
        kind: Any = stock_class(self)
        return _in_torch(kind)(self, hidden_states, *args, **kwargs)


@cache
def _in_torch(layer: Any) -> Callable[..., Any]:
    """Return the forward of a class of layers over a table of names that holds transformers' PyTorch functions."""
    stock = inspect.unwrap(layer.forward)
    operations = [name for name in _OPERATIONS if isinstance(stock, FunctionType) and name in stock.__code__.co_names]
    if not isinstance(stock, FunctionType) or not operations:
        raise ValueError(f"{layer.__name__} calls none of {', '.join(_OPERATIONS)}")
    names = {**stock.__globals__, **{name: _torch_function(stock.__globals__[name]) for name in operations}}
    own = FunctionType(stock.__code__, names, stock.__name__, stock.__defaults__, stock.__closure__)
    own.__kwdefaults__ = stock.__kwdefaults__
    return own


def _torch_function(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return the PyTorch function that an operation wraps; it passes on the arguments that this function knows."""
    function = inspect.unwrap(operation)
    known = frozenset(inspect.signature(function).parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        packed = [name for name in _PACKED if kwargs.get(name) is not None]
        if packed:
            raise ValueError(f"transformers' {function.__name__} takes no {packed[0]}: pack with adapt_for_packing")
        return function(*args, **{name: value for name, value in kwargs.items() if name in known})

    return call
