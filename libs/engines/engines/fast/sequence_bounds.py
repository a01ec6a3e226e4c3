"""The boundaries of the packed sequences of a micro-batch, in every form that a kernel wants, made once a micro-batch.

A kernel that reads boundaries on the host makes it wait until the device has caught up. What such a kernel needs is
made here from boundaries that the host has anyway, and looked up by the tensor of boundaries that the kernel is given.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

_KNOWN: "WeakValueDictionary[int, Tensor]" = WeakValueDictionary()
"""Boundaries by address, as long as they live: a compiled function may hand a kernel another object over them."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """Boundaries of the n sequences in T packed tokens.

    `cu_seqlens` i32[n + 1]; `boundaries` the same as i64; `position` i32[T], a token's place in its sequence; `longest`
    i64[] on the CPU, for kernels that want a number (an argument would be compiled in).
    """

    cu_seqlens: Tensor
    boundaries: Tensor
    position: Tensor
    longest: Tensor

    @staticmethod
    def of(cu_seqlens: Tensor, edges: tuple[int, ...], positions: Tensor | None = None) -> "Sequences":
        """Make them from boundaries on the device and the same on the host; ValueError for an empty sequence.

        `positions` [T] on the device, where they are at hand.
        """
        host = torch.tensor(edges, dtype=torch.int64)
        lengths = host.diff()
        if lengths.numel() < 1 or int(lengths.min()) < 1:
            raise ValueError(f"packed sequences must have at least one token each, got boundaries {edges}")
        if positions is None:
            positions = torch.arange(edges[-1]) - torch.repeat_interleave(host[:-1], lengths)
        boundaries = host.to(cu_seqlens.device, non_blocking=True)
        _KNOWN[boundaries.data_ptr()] = boundaries
        position = positions.to(cu_seqlens.device, torch.int32, non_blocking=True)
        return Sequences(cu_seqlens, boundaries, position, lengths.max())


def known(boundaries: Tensor) -> Tensor:
    """Return the tensor that `Sequences.of` made where it shares memory with `boundaries`; else `boundaries`."""
    original = _KNOWN.get(boundaries.data_ptr())
    return boundaries if original is None or original.shape != boundaries.shape else original


def remember(boundaries: Tensor, key: str, value: Any) -> Any:
    """Store a value with boundaries, for as long as they live."""
    setattr(known(boundaries), f"_engines_{key}", value)
    return value


def recall(boundaries: Tensor, key: str) -> Any:
    """Return what `remember` stored, or None."""
    return getattr(known(boundaries), f"_engines_{key}", None)
