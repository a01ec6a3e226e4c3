"""Sums, counts and means in float32 at least, whatever dtype comes in.

A model that computes in bfloat16 may give its log-probs in bfloat16, in which a count stalls at 256: 256 + 1 = 256.
Every objective, loss, estimator and metric widens what it is given before it does anything else. float64 stays float64.
"""

import torch
from torch import Tensor


def wide(values: Tensor) -> Tensor:
    """Return the values in float32, or unchanged where they are float32 or float64."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def pair(values: Tensor, mask: Tensor) -> Tensor:
    """Return a metric: (sum over the mask, count of the mask)."""
    return torch.stack([torch.where(mask, wide(values), 0.0).sum(), mask.sum()]).detach()


def sequence_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the sum of each packed sequence: f[T], i32[n+1] -> f[n]; differentiable. A mask is counted in int64."""
    values = values.to(torch.int64) if values.dtype == torch.bool else wide(values)
    lengths = cu_seqlens.diff()
    sequences = torch.arange(lengths.numel(), device=values.device)
    owner = torch.repeat_interleave(sequences, lengths, output_size=values.numel())  # no wait for the device
    return values.new_zeros(lengths.numel()).index_add(0, owner, values)
