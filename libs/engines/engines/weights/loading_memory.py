"""The memory that loading takes on a rank, by arithmetic on an empty model."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

from engines.families.registry import family_of
from engines.weights.empty_model import empty_model


@dataclass(frozen=True)
class LoadingMemory:
    """Bytes of the rank that has most, while it reads a directory (weights="sharded")."""

    ranks: int
    share: int
    """Bytes of its rows of every parameter, in the master dtype: on the device, or the host for a CPU."""
    largest: int
    """Bytes of its rows of the largest tensor on disk, in the dtype on disk: on the host."""


def loading_memory(
    config: PretrainedConfig,
    ranks: int,
    master_dtype: torch.dtype = torch.float32,
    disk_dtype: torch.dtype = torch.bfloat16,
) -> LoadingMemory:
    """Count the bytes for a model of this config, with a layer's experts as one tensor on disk: an upper bound."""
    family = family_of(config)
    model = empty_model(config, master_dtype, family.inside, family)
    rows = [_rows(parameter.shape, ranks) for parameter in model.parameters()]
    return LoadingMemory(ranks, sum(rows) * master_dtype.itemsize, max(rows) * disk_dtype.itemsize)


def _rows(shape: torch.Size, ranks: int) -> int:
    """Return the number of elements of the first rank's rows, which are at least those of any other."""
    return -(-shape[0] // ranks) * shape[1:].numel() if shape else 1
