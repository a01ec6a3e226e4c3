"""Tied weights that a checkpoint holds twice with different values are not tied, as in transformers."""

from typing import Any

import torch
from torch import nn

from engines.weights.disk_names import DiskNames
from engines.weights.model_directory import ModelDirectory

_ELEMENTS = 2**22
"""Number of elements compared at a time."""


def untie_what_differs(model: Any, source: ModelDirectory, names: DiskNames) -> tuple[str, ...]:
    """Give tied parameters of an empty model that differ on disk tensors of their own; return their names."""
    first: dict[nn.Parameter, str] = {}
    untied = []
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        tied_to = first.setdefault(parameter, name)
        parts = [[part.name for part in names.parts(one, parameter.shape)] for one in (name, tied_to)]
        if tied_to == name or any(part not in source.tensors for one in parts for part in one):
            continue
        if all(a == b or _equal(source, a, b) for a, b in zip(*parts, strict=True)):
            continue
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, nn.Parameter(torch.empty_like(parameter)))
        model.all_tied_weights_keys.pop(name, None)  # what transformers ties again when it is asked to
        untied.append(name)
    return tuple(untied)


def _equal(source: ModelDirectory, one: str, other: str) -> bool:
    """Return whether two tensors on disk have equal values, some rows at a time."""
    shape = source.tensors[one].shape
    if source.tensors[other].shape != shape or None in (source.tensors[one].dtype, source.tensors[other].dtype):
        return True  # refused elsewhere, by name
    step = max(1, _ELEMENTS * shape[0] // max(1, torch.Size(shape).numel()))
    slices = [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]
    return all(torch.equal(source.rows(one, rows).double(), source.rows(other, rows).double()) for rows in slices)
