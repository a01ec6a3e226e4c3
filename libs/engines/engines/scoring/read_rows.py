"""The last decoder layer, computed for the tokens that are read alone: those whose hidden states score a token.

Behind the last mixer no token sees another, so that a row which nobody reads needs neither its query and gate nor an
output projection or MLP; it still needs keys, values and the inputs of a recurrence. Where prompts are long beside what
is trained this saves most of that layer. Rows that are not read are zero behind these modules.

Invariants (tests, by family): scores and gradients are those of all rows, and a call that says nothing of its rows is
the model's own.
"""

import math
from typing import Any

from torch import Tensor, nn

from engines.families.registry import family_of
from seqpack.adapters.context import CONTEXT_KEY, PackedContext

READ = "read_rows"
"""Key in `PackedContext.derived` of i64[N], distinct rows of the packed tokens."""
_OF_A_ROW = ("q_proj", "in_proj_z", "o_proj", "out_proj")
"""Modules of mixers whose output for a row serves that row alone."""
_WORTH = 0.9
"""Largest share of rows at which gathering and scattering still pays."""


def compute_read_rows(model: Any) -> tuple[nn.Module, ...]:
    """Make a model's last decoder layer compute the rows of `PackedContext.derived[READ]`; return its changed modules.

    For a model that is adapted for packing. None of a family with experts: routers count what every row chooses; none
    of one whose layers are not known by name.
    """
    family = family_of(model.config)
    if family.routed or not family.registered:
        return ()
    layer: Any = family.layers(model)[-1]
    mixer, _ = next(iter(family.mixers(layer)))
    modules = [*(module for name, module in mixer.named_children() if name in _OF_A_ROW), layer.mlp]
    here = _Rows()
    mixer.register_forward_pre_hook(here.begin, with_kwargs=True)
    for module in modules:
        module.register_forward_pre_hook(here.gather)
        module.register_forward_hook(here.scatter)
    return tuple(modules)


class _Rows:
    """The rows that the running layer computes, None for all; its methods are hooks, so that a copy has its own."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None
        self.shape: tuple[int, ...] | None = None

    def begin(self, mixer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the rows of this call of the layer: each call, recomputed too, begins with its mixer."""
        del mixer, args
        context: PackedContext | None = kwargs.get(CONTEXT_KEY)
        self.rows = None if context is None else context.derived.get(READ)

    def gather(self, module: nn.Module, args: tuple[Tensor]) -> Tensor | None:
        """Return the rows to compute in the place of all; None where gathering does not pay."""
        del module
        flat, rows = args[0].flatten(0, -2), self.rows
        if rows is None or len(rows) > _WORTH * len(flat):
            self.shape = None
            return None
        self.shape = tuple(args[0].shape[:-1])
        return flat.index_select(0, rows)

    def scatter(self, module: nn.Module, args: tuple[Tensor], y: Tensor) -> Tensor | None:
        """Put the computed rows at their places; the other rows are zero."""
        del module, args
        if self.shape is None or self.rows is None:
            return None
        whole = y.new_zeros(math.prod(self.shape), y.shape[-1])
        return whole.index_copy(0, self.rows, y).view(*self.shape, y.shape[-1])
