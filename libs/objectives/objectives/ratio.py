"""The log-ratio of two policies, bounded so that its exponential is finite: here alone is exp(new - old) taken.

One trained token of log-ratio 89 makes exp infinite in float32 and the gradient of the whole step NaN, under a finite
loss. So a log-ratio is bounded to [LOWEST, HIGHEST] (verl bounds it too). Within the bounds it keeps its bits; beyond
them it is constant (its gradient is 0) and counted: `clamped` is what the metrics `ratio/clamped`, `kl/clamped` and
`mismatch/clamped` average. An infinite log-prob is bounded and counted as well. NaN stays NaN, so that the loss is NaN
and an engine's guard against such steps sees it; the difference of two equal infinities is NaN too.
"""

import torch
from torch import Tensor

from objectives.sums import sequence_sums, wide

HIGHEST = 20.0
"""The largest log-ratio. exp(20) = 4.9e8, and its square is finite in float32."""
LOWEST = -100.0
"""The smallest log-ratio: exp(-100) is 0 next to anything. Low, so that a KL penalty keeps its gradient there."""


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """Return new - old, in float32 at least, bounded to [LOWEST, HIGHEST]; f[T]."""
    return (wide(new) - wide(old)).clamp(LOWEST, HIGHEST)


def ratio(new: Tensor, old: Tensor) -> Tensor:
    """Return exp(new - old), the probability ratio of each token; f[T], finite unless an input is NaN."""
    return log_ratio(new, old).exp()


def clamped(new: Tensor, old: Tensor) -> Tensor:
    """Return the tokens whose log-ratio lies beyond the bounds, bool[T]."""
    gap = (wide(new) - wide(old)).detach()
    return (gap < LOWEST) | (gap > HIGHEST)


def ratio_excess(new: Tensor, old: Tensor) -> Tensor:
    """Return r - 1 - log r with r = exp(new - old), exact for small log-ratios; f[T], never negative."""
    gap = log_ratio(new, old)
    return torch.expm1(gap) - gap


def binary_kl(old: Tensor, new: Tensor) -> Tensor:
    """Return KL(old || new) of the two-way choice between the token and all others together, nats; f[T].

    `old`, `new`: log-probs f[T]. The others' probability is at least 1e-10, so that a certain token gives no infinity.
    """
    old, new = wide(old), wide(new)
    rest_old, rest_new = ((-torch.expm1(x.clamp(max=0))).clamp(min=1e-10) for x in (old, new))
    return old.exp() * log_ratio(old, new) + rest_old * (rest_old.log() - rest_new.log())


def probability_change(new: Tensor, old: Tensor) -> Tensor:
    """Return exp(new) - exp(old), how far the token's probability moved; f[T]."""
    return wide(new).exp() - wide(old).exp()


def sequence_ratios(
    new: Tensor, old: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, geometric_mean: bool = False
) -> Tensor:
    """Return the ratio of each sequence's trained tokens, f[n]: their product, or its root of their number (GSPO).

    The bound is that of the sum (or mean), not of each token: far tokens cancel out as the formula says.
    """
    gap = torch.where(loss_mask, wide(new) - wide(old), 0.0).clamp(-1e4, 1e4)  # inf - inf is NaN, 1e4 - 1e4 is not
    total = sequence_sums(gap, cu_seqlens)
    if geometric_mean:
        total = total / sequence_sums(loss_mask, cu_seqlens).clamp(min=1)
    return ratio(total, torch.zeros_like(total))
