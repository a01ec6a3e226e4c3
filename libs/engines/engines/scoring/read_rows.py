"""The last decoder layer, computed for the tokens that are read alone: those whose hidden states score a token.

Behind the last mixer no token sees another, so that a row which nobody reads needs neither its query and gate nor an
output projection or MLP; it still needs keys, values and the inputs of a recurrence. Where prompts are long beside what
is trained this saves most of that layer. Rows that are not read are zero behind these modules.

Invariants (tests, by family): scores and gradients are those of all rows, and a call that says nothing of its rows is
the model's own.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import Tensor, nn

from engines.families.registry import family_of
from seqpack.adapters.context import PackedContext
from seqpack.adapters.mixers import CONTEXT_KEY

READ = "read_rows"
"""Key in `PackedContext.derived` of i64[N], distinct rows of the packed tokens."""
_OF_A_ROW = ("q_proj", "in_proj_z", "o_proj", "out_proj")
"""Modules of mixers whose output for a row serves that row alone."""
_WORTH = 0.9
"""Largest share of rows at which gathering and scattering still pays."""


def compute_read_rows(model: Any) -> tuple[nn.Module, ...]:
    """Make a model's last decoder layer compute the rows of `PackedContext.derived[READ]`; return its changed modules.

    For a model that is adapted for packing. None of a family with experts: routers count what every row chooses.
    """
    family = family_of(model.config)
    if family.routed:
        return ()
    layer: Any = family.layers(model)[-1]
    mixer, _ = next(iter(family.mixers(layer)))
    modules = [*(module for name, module in mixer.named_children() if name in _OF_A_ROW), layer.mlp]
    here = _Rows()
    mixer.forward = MethodType(here.reading(mixer.forward), mixer)
    for module in modules:
        module.forward = MethodType(here.computing(module.forward), module)
    return tuple(modules)


class _Rows:
    """The rows that the running layer computes; None for all."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None

    def reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a mixer's forward that reads the rows first: each call of the layer, recomputed too, begins there."""

        def forward(mixer: Any, *args: Any, **kwargs: Any) -> Any:
            del mixer
            context: PackedContext | None = kwargs.get(CONTEXT_KEY)
            self.rows = None if context is None else context.derived.get(READ)
            return original(*args, **kwargs)

        return forward

    def computing(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return a module's forward on these rows; the other rows are zero."""

        def forward(module: Any, x: Tensor) -> Tensor:
            del module
            flat, rows = x.flatten(0, -2), self.rows
            if rows is None or len(rows) > _WORTH * len(flat):
                return original(x)
            y = original(flat.index_select(0, rows))
            return y.new_zeros(len(flat), y.shape[-1]).index_copy(0, rows, y).view(*x.shape[:-1], y.shape[-1])

        return forward
