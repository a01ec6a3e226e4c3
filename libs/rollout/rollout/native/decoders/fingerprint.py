"""A fingerprint of a module's weights, by which changes are seen."""

import torch
from torch import nn

from rollout.private_api import writes

_PROBED = 4
"""Number of elements of each parameter that are compared by value."""


def fingerprint(model: nn.Module) -> tuple[object, ...] | None:
    """Return a value that changes when a parameter is replaced or written to; None where changes can't be seen.

    torch counts the writes to a tensor, but not those through `.data`, nor any to a tensor made in inference mode: of
    each parameter a few elements are compared as well, which a step of training changes in nearly all of them. NaN is
    always a change.
    """
    parameters = list(model.parameters())
    if any(p.is_inference() for p in parameters):
        return None
    with torch.no_grad():
        plain = [p.as_strided((min(_PROBED, p.numel()),), (1,)) for p in parameters if p.is_contiguous()]
        probes = torch.cat(plain).double() if plain else None
    return (
        *((p.data_ptr(), writes(p)) for p in parameters),
        *(probes.tolist() if probes is not None else ()),
    )
