"""The norms of one transformers model on a CPU by `seqpack.ops.norms`: an adaptation of that instance, with `undo()`.

The stock ones are chains of passes over fresh memory. Values are those of the stock formulas but for the order of
their roundings; what is not float32 or float64 goes through the stock code.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from engines.devices.adaptations import Adaptation, Applied, Patch, apply
from engines.devices.layer_matching import Forward, Forwards, with_forward
from seqpack.ops.norms import rms_norm

_WIDE = (torch.float32, torch.float64)


def use_host_norms(model: Any) -> Applied:
    """Make a registered transformers model normalise by blocks of rows, and return what was changed."""
    adaptation = Adaptation("norms by blocks of rows", "torch", ">=2.11", lambda: list(_patches(model)))
    return apply(adaptation, held=vars(model).setdefault("_adaptations", {}))


def _patches(model: nn.Module) -> Iterator[Patch]:
    for module in model.modules():
        kind: Any = type(module)
        if (own := _FORWARDS.of(module)) is not None:
            yield Patch(module, "__class__", with_forward(kind, _or_stock(kind, own)))


@cache
def _or_stock(kind: Any, own: Forward) -> Forward:
    def forward(self: Any, x: Tensor, *args: Tensor) -> Tensor:
        chosen = own if x.dtype in _WIDE and self.weight.dtype == x.dtype else kind.forward
        normed: Tensor = chosen(self, x, *args)
        return normed

    return forward


def _norm(self: Any, x: Tensor) -> Tensor:
    return rms_norm(x, self.weight, self.variance_epsilon)


def _centred_norm(self: Any, x: Tensor) -> Tensor:
    return rms_norm(x, 1.0 + self.weight, self.eps)


def _gated_norm(self: Any, x: Tensor, gate: Tensor) -> Tensor:
    return rms_norm(x, self.weight, self.variance_epsilon) * silu(gate)


_FORWARDS = Forwards(_norm, _centred_norm, _gated_norm)
