"""Policy losses of one ratio a sequence: GSPO and GMPO. Their papers average over sequences: aggregation "sequence"."""

import torch
from torch import Tensor

from objectives.choices import check_clips
from objectives.policy_loss import PolicyTokens, TokenLoss, register_policy_loss
from objectives.ratio import log_ratio
from objectives.ratio import ratio as ratio_of
from objectives.sums import sequence_sums, wide


def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """Return -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s the geometric mean of a sequence's token ratios.

    GSPO (arXiv 2507.18071, equations 5 and 7) in its token form (equations 13 and 14): the value of s with the gradient
    of the token's own log-prob. Equal advantages in a sequence give GSPO itself, and they may differ. Tensors f[T],
    `loss_mask` bool[T], `cu_seqlens` i32[n+1]. Metrics: ratio, clip/low, clip/high.
    """
    check_clips(clip_low, clip_high)
    advantage = wide(advantages.detach())
    gap = log_ratio(log_probs, old_log_probs.detach())
    mean = _mean_of_sequence(gap.detach(), loss_mask, cu_seqlens) + (gap - gap.detach())
    s = ratio_of(mean, torch.zeros_like(mean))
    loss = -torch.minimum(s * advantage, s.clamp(1 - clip_low, 1 + clip_high) * advantage)
    metrics = {
        "ratio": s.detach(),
        "clip/low": (s < 1 - clip_low) & (advantage < 0),
        "clip/high": (s > 1 + clip_high) & (advantage > 0),
    }
    return TokenLoss(loss, metrics)


def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> TokenLoss:
    """Return -A times the geometric mean of a sequence's clipped token ratios: GMPO (arXiv 2507.20673).

    The bounds are of the log-ratio, e^-clip_low to e^clip_high (0.4 both in the paper), on the side that PPO clips:
    from above for A > 0, from below for A < 0. Shapes as in `gspo`; the mean of a sequence's advantages over its
    trained tokens counts. Metrics: ratio, clip/low, clip/high.
    """
    check_clips(clip_low, clip_high)
    advantage = _mean_of_sequence(wide(advantages.detach()), loss_mask, cu_seqlens)
    gap = log_ratio(log_probs, old_log_probs.detach())
    bounded = torch.where(advantage > 0, gap.clamp(max=clip_high), gap.clamp(min=-clip_low))
    mean = _mean_of_sequence(bounded, loss_mask, cu_seqlens)
    metrics = {
        "ratio": ratio_of(gap.detach(), torch.zeros_like(gap)),
        "clip/low": (gap < -clip_low) & (advantage < 0),
        "clip/high": (gap > clip_high) & (advantage > 0),
    }
    return TokenLoss(-advantage * ratio_of(mean, torch.zeros_like(mean)), metrics)


@register_policy_loss("gspo", scales_with_advantage=True, clip_low=3e-4, clip_high=4e-4)
def _gspo(tokens: PolicyTokens, clip_low: float, clip_high: float) -> TokenLoss:
    return gspo(*_of(tokens), clip_low, clip_high)


@register_policy_loss("gmpo", scales_with_advantage=True, clip_low=0.4, clip_high=0.4)
def _gmpo(tokens: PolicyTokens, clip_low: float, clip_high: float) -> TokenLoss:
    return gmpo(*_of(tokens), clip_low, clip_high)


def _of(tokens: PolicyTokens) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tokens.log_probs, tokens.old_log_probs, tokens.advantages, tokens.mask, tokens.batch.cu_seqlens


def _mean_of_sequence(values: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return for each token the mean over its sequence's trained tokens, f[T]; 0 without any."""
    total = sequence_sums(torch.where(loss_mask, values, 0.0), cu_seqlens)
    mean = total / sequence_sums(loss_mask, cu_seqlens).clamp(min=1)
    return torch.repeat_interleave(mean, cu_seqlens.diff(), output_size=loss_mask.numel())
